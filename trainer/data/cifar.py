"""Reads CIFAR-10 as people have it: torchvision's copy, the binary version or its archive, or folders of images.

torchvision itself reads cifar-10-batches-py, whose pickled batches it runs only if their checksums are right.
cifar-10-batches-bin has 3,073 bytes for each image: its label, and 32 × 32 pixels of red, green and blue. Source:
https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.data.config import SourceOptions
from trainer.data.decoded_images import DecodedImages
from trainer.data.reading import Split, read_source
from trainer.torchvision_schemas import import_module
from weightserver.core.arrays import Int64Array

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_BINARY = [f"{name}.bin" for name in (*_TRAIN, *_TEST)]
_TORCHVISIONS = "cifar-10-batches-py"
_COPIES = ("", "cifar-10-batches-bin", "cifar-10-binary.tar.gz")
"""Where a folder has them, in this order; the first is the folder itself."""


_Batch = tuple[npt.NDArray[np.uint8], Int64Array]
"""Images uint8 [n, 3072], or [n, 3, 32, 32], and labels [n]."""


class Cifar(NamedTuple):
    """All images uint8 [n, 3, 32, 32] and labels int64 [n]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def read_cifar(source: Path) -> Cifar:
    """The images in a folder or archive.

    Raises:
        ValueError: neither holds CIFAR-10, or a file of it is damaged.
    """
    if (source / "train").is_dir():
        return _of_folders(source)
    root = source.parent if source.name == _TORCHVISIONS else source
    if (root / _TORCHVISIONS).is_dir():
        return _of_torchvision(root)
    for place in (source / copy for copy in _COPIES):
        if (place.is_dir() or place.is_file()) and (files := _files(place)):
            parts = [_joined(place, files, names) for names in (_TRAIN, _TEST)]
            return Cifar(*(torch.from_numpy(array) for part in parts for array in part))
    raise ValueError(
        f"{source} holds no CIFAR-10: give a folder with {', '.join([_TORCHVISIONS, *_COPIES[1:]])}, or with a folder "
        "for each class in train and test"
    )


def _files(place: Path) -> dict[str, bytes]:
    """The batches in a folder or archive by their names, none if it lacks one of them. Raises ValueError."""
    try:
        if place.is_dir():
            found = {path.name: path.read_bytes() for path in place.iterdir() if path.name in _BINARY}
        else:
            found = {}
            with tarfile.open(place) as archive:
                for member in archive:
                    path = Path(member.name)
                    if (
                        path.suffix == ".bin"
                        and path.stem in (*_TRAIN, *_TEST)
                        and (file := archive.extractfile(member))
                    ):
                        found[path.name] = file.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ValueError(f"cannot read {place} ({error}): fetch it again") from error
    return found if len(found) == len(_BINARY) else {}


def _joined(place: Path, files: Mapping[str, bytes], names: tuple[str, ...]) -> _Batch:
    images, labels = [], []
    for name in names:
        found, classes = _of_binary(place, files[f"{name}.bin"])
        images.append(found.reshape(-1, 3, SIDE, SIDE))
        labels.append(classes)
    return np.concatenate(images), np.concatenate(labels)


def _of_binary(place: Path, content: bytes) -> _Batch:
    if not content or len(content) % (1 + 3 * SIDE * SIDE):
        raise ValueError(f"{place} has a batch of {len(content)} bytes, which is cut off: fetch it again")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * SIDE * SIDE)
    if records[:, 0].max() >= len(CLASSES):
        raise ValueError(f"{place} has an image of class {records[:, 0].max()}: it is not CIFAR-10, fetch it again")
    return records[:, 1:], records[:, 0].astype(np.int64)


def _of_torchvision(root: Path) -> Cifar:
    parts: list[Tensor] = []
    for train in (True, False):
        try:
            part = import_module("torchvision.datasets").CIFAR10(root, train=train)
        except RuntimeError as error:
            raise ValueError(f"{root / _TORCHVISIONS} is damaged ({error}): fetch it again") from error
        parts += [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)]
    return Cifar(*parts)


def _of_folders(source: Path) -> Cifar:
    """Images by class, train/CLASS/NAME and test/CLASS/NAME, decoded: the first of each class, then the second, ...,
    so that the first so many are of all classes, as in the other copies."""
    reading = read_source(source, SourceOptions())
    if reading.test is None or not reading.train.classes == reading.test.classes == CLASSES:
        raise ValueError(f"{source} has other folders than train/CLASS and test/CLASS of {', '.join(CLASSES)}")
    return Cifar(*_decoded(reading.train), *_decoded(reading.test))


def _decoded(split: Split) -> tuple[Tensor, Tensor]:
    labels = torch.from_numpy(split.listing.labels())
    place = torch.zeros_like(labels)
    for label in range(len(CLASSES)):
        place[labels == label] = torch.arange(int((labels == label).sum()))
    order = torch.argsort(place * len(CLASSES) + labels)
    return DecodedImages(split.listing, SIDE).strict()[order], labels[order]
