"""Reads CIFAR-10 as people have it: torchvision's copy, or folders of images.

torchvision itself reads cifar-10-batches-py, whose pickled batches it runs only if their checksums are right.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.data.config import SourceOptions
from trainer.data.decoded_images import DecodedImages
from trainer.data.reading import Split, read_source
from trainer.torchvision_schemas import import_module

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
_TORCHVISIONS = "cifar-10-batches-py"


class Cifar(NamedTuple):
    """All images uint8 [n, 3, 32, 32] and labels int64 [n]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def read_cifar(source: Path) -> Cifar:
    """The images in a folder.

    Raises:
        ValueError: it does not hold CIFAR-10, or a file of it is damaged.
    """
    if (source / "train").is_dir():
        return _of_folders(source)
    root = source.parent if source.name == _TORCHVISIONS else source
    if (root / _TORCHVISIONS).is_dir():
        return _of_torchvision(root)
    raise ValueError(
        f"{source} holds no CIFAR-10: give a folder with {_TORCHVISIONS}, or with a folder for each class in train and "
        "test"
    )


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
    so that the first so many are of all classes, as in torchvision's copy."""
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
