"""The folders and labels of Cityscapes (Cordts et al., 1604.01685).

Folders are those of the archives leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip. Labels are converted from
the 34 ids of the files to the 19 classes that are evaluated; all other pixels are ignored.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainer.torchvision_schemas import import_module

NUM_CLASSES = 19
IGNORED = 255
"""Label of pixels that count neither in training nor in evaluation."""
_UNKNOWN = 254

UInt8Array = NDArray[np.uint8]


class LabelledImage(NamedTuple):
    """An image and the labels of its pixels, as PNG files of the same size."""

    image: Path
    label: Path


def list_split(directory: Path, split: str) -> list[LabelledImage]:
    """The images of "train" or "val" with the places of their labels, sorted by city and name.

    Raises:
        ValueError: a folder is missing or empty.
    """
    try:
        found = import_module("torchvision.datasets").Cityscapes(directory, split, target_type="semantic")
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"{directory} has no whole leftImg8bit/{split} and gtFine/{split} ({error}): extract Cityscapes' "
            "leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip there"
        ) from None
    pairs = [
        LabelledImage(Path(image), Path(label)) for image, (label,) in zip(found.images, found.targets, strict=True)
    ]
    if not pairs:
        raise ValueError(f"{directory}/leftImg8bit/{split} has no images: extract Cityscapes' archives again")
    return sorted(pairs)


def read_pair(pair: LabelledImage) -> tuple[Image.Image, UInt8Array]:
    """An image as RGB, and the class of each of its pixels: uint8 [height, width], 0..18 or IGNORED.

    Raises:
        ValueError: a file is damaged, sizes differ, or a label id is unknown; the message names the file.
    """
    image, labels = _read(pair.image).convert("RGB"), read_labels(pair.label)
    if labels.shape[::-1] != image.size:
        raise ValueError(f"{pair.label} is not of the size of its image: restore both from Cityscapes' archives")
    return image, labels


def read_labels(path: Path) -> UInt8Array:
    """The class of each pixel: uint8 [height, width], 0..18 or IGNORED. Raises ValueError as `read_pair`."""
    ids = np.asarray(_read(path))
    labels: UInt8Array = _class_of_id()[ids.astype(np.uint8)]
    if ids.ndim != 2 or ids.dtype != np.uint8 or (labels == _UNKNOWN).any():
        raise ValueError(f"{path} has other label ids than Cityscapes' 0..33: restore it")
    return labels


def class_names() -> list[str]:
    """The names of the 19 classes, in order."""
    known = [entry for entry in _table() if entry.train_id in range(NUM_CLASSES)]
    return [entry.name for entry in sorted(known, key=lambda entry: int(entry.train_id))]


def _read(path: Path) -> Image.Image:
    """Decodes a PNG file."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            return image
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not a complete PNG image ({' '.join(str(error).split())}): restore it") from None


@cache
def _class_of_id() -> UInt8Array:
    """uint8 [256]: the class of each label id, IGNORED or _UNKNOWN."""
    classes = np.full(256, _UNKNOWN, np.uint8)
    for entry in _table():
        if entry.id >= 0:
            classes[entry.id] = entry.train_id if entry.train_id in range(NUM_CLASSES) else IGNORED
    return classes


def _table() -> list[Any]:
    """Cityscapes' table of classes."""
    classes: list[Any] = import_module("torchvision.datasets").Cityscapes.classes
    return classes
