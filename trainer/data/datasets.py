"""Loads data sets by name, and all images of a source or a pack."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.config import DECODED, FOLDER, PACKED, SourceOptions
from trainer.data.dataset import NO_TEST_IMAGES, Dataset, StoredLabels
from trainer.data.decode import decoded_side
from trainer.data.decoded_images import DecodedImages
from trainer.data.in_memory import DATASETS
from trainer.data.left_out import LeftOut, Reason
from trainer.data.listing import NO_LABEL, Listing
from trainer.data.manifest import is_packed
from trainer.data.packed import PackedImages
from trainer.data.reading import Reading, read_source
from trainer.data.synthetic import NUM_CHANNELS, SyntheticImages
from weightserver.common.object_store import shown

SYNTHETIC = "synthetic"


def load_dataset(
    name: str,
    directory: Path | None = None,
    *,
    num_images: int | None = None,
    image_size: int = 32,
    seed: int = 0,
    decode_threads: int | None = None,
    options: SourceOptions | None = None,
) -> Dataset:
    """Loads a data set by name, from `directory` if given, otherwise from the usual places.

    fashion-mnist: otherwise the system's copy or torchvision's download; the checksums are verified. cifar-10: any copy
    that `read_cifar` reads; otherwise torchvision's download. idx: four files named like MNIST's in `directory`. Of
    these three, the first `num_images` training images, and all for evaluation. synthetic: `num_images` colour images
    of `image_size` pixels, generated from `seed`, without labels. folder, packed: what `read_source` or `PackedImages`
    reads, decoded for each use: crops of the whole image for training, centres for evaluation.

    Args:
        decode_threads: default: this rank's share of the cores.

    Raises:
        ValueError: an unknown name, arguments that do not apply, or images that are not found; its line says what was
            tried and what to do.
    """
    if name == SYNTHETIC:
        return _make_synthetic(directory, num_images, image_size, seed)
    if name not in DATASETS and name not in DECODED:
        known = sorted([*DATASETS, *DECODED, SYNTHETIC])
        raise ValueError(f"unknown data set {name!r}: choose one of {', '.join(known)}")
    if name in DECODED:
        if num_images is not None:
            raise ValueError(f"data set {name!r} is used whole: omit --num-images, or pack fewer images")
        if directory is None:
            raise ValueError(f"data set {name!r} needs a folder: give --data-dir with the images")
        if name == FOLDER and is_packed(directory):
            raise ValueError(f"{shown(directory)} holds packed images, not a folder of images: give --dataset packed")
        options = options or SourceOptions()
        source = _packed(directory, options) if name == PACKED else _unpacked(directory, options)
        return _decoded(source, image_size, decode_threads)
    whole = DATASETS[name](directory)
    return whole if num_images is None else _first_images(whole, num_images)


def load_splits(
    source: Path,
    *,
    image_size: int,
    options: SourceOptions,
    decode_threads: int | None = None,
) -> dict[str, DecodedImages]:
    """All images of a folder, archive, list or pack, by the names of its splits; under an empty name without splits.

    Raises:
        ValueError: a source that cannot be read, or has no images.
    """
    found = open_source(source, options)
    found.log_left_out()
    side = decoded_side(image_size)
    return {
        name if len(found.splits) > 1 else "": DecodedImages(
            stored.images, side, found.options, threads=decode_threads, digests=stored.digests
        )
        for name, stored in found.splits.items()
    }


def _first_images(whole: Dataset, num_images: int) -> Dataset:
    """The first training images of a data set in memory, and all of its test images."""
    num_all = len(whole.train_images)
    if not 1 <= num_images <= num_all:
        raise ValueError(f"--num-images must lie in 1..{num_all}, the number of training images, got {num_images}")
    images, labels = whole.train_images, whole.train_labels
    assert isinstance(images, Tensor)
    return replace(whole, train_images=images[:num_images], train_labels=labels[:num_images], whole=whole)


def _make_synthetic(directory: Path | None, num_images: int | None, image_size: int, seed: int) -> Dataset:
    if directory is not None:
        raise ValueError(f"data set {SYNTHETIC!r} is generated: omit --data-dir {directory}")
    if num_images is None:
        raise ValueError(f"data set {SYNTHETIC!r} needs a number of images: give --num-images")
    return Dataset(
        train_images=SyntheticImages(num_images=num_images, image_size=image_size, seed=seed),
        train_labels=torch.empty(0, dtype=torch.int64),
        test_images=torch.empty(0, NUM_CHANNELS, image_size, image_size, dtype=torch.uint8),
        test_labels=torch.empty(0, dtype=torch.int64),
    )


_NO_LABELS = StoredLabels(0, lambda: torch.empty(0, dtype=torch.int64))


class Stored(NamedTuple):
    """Images of a split or a pack, encoded, and their labels."""

    images: Listing | PackedImages
    labels: StoredLabels
    """One for each image, or none."""
    classes: tuple[str, ...]
    digests: tuple[str, ...]
    """One for each range of images."""


class Source(NamedTuple):
    """A source of images or a pack."""

    splits: dict[str, Stored]
    """The training images, then the test images, if any, then others."""
    options: SourceOptions
    """How the images become colours."""
    test_place: Path
    """The folder of the test images, for messages."""
    reading: Reading | None
    """What it was read as; None for a pack."""
    order: dict[str, Any]
    """What a `Dataset` has of a pack: `range_sizes` and `order_seed`."""

    def log_left_out(self) -> None:
        """Logs what the source leaves out."""
        if self.reading:
            self.reading.left_out.log(self.reading.source)


def open_source(source: Path, options: SourceOptions) -> Source:
    """Opens a source or a pack.

    Raises:
        ValueError: a source that cannot be read, or has no images.
    """
    return _packed(source, options) if is_packed(source) else _unpacked(source, options)


def _unpacked(source: Path, options: SourceOptions) -> Source:
    reading = read_source(source, options)
    splits = {
        split.name: _stored(split.listing, split.labelled, split.classes, [bytes(split.listing.content)])
        for split in reading.splits
    }
    return Source(splits, options, Path(reading.test.source if reading.test else source), reading, {})


def _packed(source: Path, options: SourceOptions) -> Source:
    test = source / "test"
    packs = {"train": PackedImages(source, options)}
    if is_packed(test):
        packs["test"] = PackedImages(test, options)
    manifest = packs["train"].manifest
    splits = {}
    for name, images in packs.items():
        contents = ["".join(shard.sha256 for shard in part.shards).encode() for part in images.manifest.ranges]
        splits[name] = _stored(images, images.manifest.labelled, images.manifest.classes, contents)
    order = {"range_sizes": manifest.sizes, "order_seed": manifest.order_seed}
    return Source(splits, options.of_pack(source, manifest.options), test, None, order)


def _stored(
    images: Listing | PackedImages, labelled: bool, classes: tuple[str, ...], contents: Iterable[bytes]
) -> Stored:
    labels = StoredLabels(len(images) if labelled else 0, lambda: torch.from_numpy(images.labels()))
    return Stored(images, labels, classes, tuple(hashlib.sha256(content).hexdigest() for content in contents))


def _decoded(source: Source, image_size: int, threads: int | None) -> Dataset:
    """A data set of decoded images. Without labels of the training images, it has no test images.

    A single class is no label: every classifier would be right. Test images without labels are omitted, as are, with a
    line, those of a class that no training image has. Classes have the training images' numbers.
    """
    source.log_left_out()
    train, test, *_ = *source.splits.values(), None
    untested = NO_TEST_IMAGES

    def decoded(images: Listing | PackedImages) -> DecodedImages:
        side = decoded_side(image_size)
        return DecodedImages(images, side, source.options, threads=threads)

    train_images = decoded(train.images)
    if _are_of_one_class(train):
        untested = "all images are of one class, which is no label"
        train = train._replace(labels=_NO_LABELS)
    labels = torch.empty(0, dtype=torch.int64)
    if test and len(test.labels) and len(train.labels):
        own = test.labels.read()
        labels = as_in_training(own, test.classes, train)
        others = torch.nonzero((labels == NO_LABEL) & (own != NO_LABEL))[:, 0].tolist()
        if not (labels != NO_LABEL).any():
            untested = f"no training image is of a class of the test images in {shown(source.test_place)}"
            labels = labels[:0]
        elif others:
            left_out = LeftOut()
            left_out.add(Reason.OTHER_CLASS, test.images.path(others[0]), len(others))
            left_out.log(source.test_place)
    return Dataset(
        train_images=train_images,
        train_labels=train.labels,
        test_images=decoded(test.images) if test and len(labels) else train_images[:0],
        test_labels=labels,
        digests=train.digests,
        test_digests=test.digests if test and len(labels) else (),
        class_names=train.classes,
        evaluated_side=image_size,
        untested=untested,
        reading=source.reading,
        **source.order,
    )


def as_in_training(labels: Tensor, classes: Sequence[str], train: Stored) -> Tensor:
    """The labels of test images by the numbers that their classes have among the training images, int64 [M];
    `NO_LABEL` for a class that these lack. Only numbers without names are compared with the training images' labels."""
    if bool(classes) != bool(train.classes):
        return torch.full_like(labels, NO_LABEL)
    if not classes:
        return torch.where(torch.isin(labels, train.labels.read()), labels, NO_LABEL)
    number_of = {name: number for number, name in enumerate(train.classes)}
    return torch.tensor([*(number_of.get(name, NO_LABEL) for name in classes), NO_LABEL])[labels]


def _are_of_one_class(train: Stored) -> bool:
    if train.classes or not len(train.labels):
        return len(train.classes) == 1
    labels = train.labels.read()
    return len(torch.unique(labels[labels != NO_LABEL])) < 2
