"""Reads CIFAR-10 as people have it: torchvision's copy, the binary version or its archive, or folders of images.

torchvision itself reads cifar-10-batches-py, whose pickled batches it runs only if their checksums are right.
cifar-10-batches-bin has 3,073 bytes for each image: its label, and 32 × 32 pixels of red, green and blue. Source:
https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.archives import headers
from trainer.data.config import SourceOptions
from trainer.data.decoded_images import DecodedImages
from trainer.data.reading import Split, read_source
from trainer.torchvision_schemas import import_module

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
_BINARY = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
_TORCHVISIONS = "cifar-10-batches-py"
_COPIES = ("", "cifar-10-batches-bin", "cifar-10-binary.tar.gz")
"""Where a folder has them, in this order; the first is the folder itself."""


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
        if place.exists() and (batches := _batches(place)):
            train, test = np.concatenate(batches[:-1]), batches[-1]
            return Cifar(*_of_records(train), *_of_records(test))
    raise ValueError(
        f"{source} holds no CIFAR-10: give a folder with {', '.join([_TORCHVISIONS, *_COPIES[1:]])}, or with a folder "
        "for each class in train and test"
    )


def _batches(place: Path) -> list[NDArray[np.uint8]]:
    """The batches in a folder or archive, uint8 [n, 3073] each; none if it lacks one of them. Raises ValueError."""
    try:
        if place.is_dir():
            found = {path.name: path.read_bytes() for path in place.iterdir() if path.name in _BINARY}
        else:
            with tarfile.open(place) as archive:
                regular = (member for member in headers(archive) if member.isreg())
                files = ((Path(member.name).name, archive.extractfile(member)) for member in regular)
                found = {name: file.read() for name, file in files if file and name in _BINARY}
    except (OSError, EOFError, tarfile.TarError) as error:
        raise ValueError(f"cannot read {place} ({error}): fetch it again") from error
    return [_records(place, found[name]) for name in _BINARY] if len(found) == len(_BINARY) else []


def _records(place: Path, content: bytes) -> NDArray[np.uint8]:
    if not content or len(content) % (1 + 3 * SIDE * SIDE):
        raise ValueError(f"{place} has a batch of {len(content)} bytes, which is cut off: fetch it again")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * SIDE * SIDE)
    if records[:, 0].max() >= len(CLASSES):
        raise ValueError(f"{place} has an image of class {records[:, 0].max()}: it is not CIFAR-10, fetch it again")
    return records


def _of_records(records: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    images = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
    return torch.tensor(images), torch.tensor(records[:, 0], dtype=torch.int64)


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
    so that the first images, however many, are of all classes, as in the other copies."""
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
