"""Data sets by name, and the places where the trainer looks for each."""

import hashlib
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.error import URLError

import torch
from torch import Tensor

from trainer.data.cifar import CLASSES as CIFAR_CLASSES
from trainer.data.cifar import read_cifar
from trainer.data.config import DECODED, FOLDER, PACKED, SourceOptions
from trainer.data.decode import decoded_side
from trainer.data.decoded_images import DecodedImages
from trainer.data.idx import find_idx, read_idx
from trainer.data.labels import LabelsField, StoredLabels
from trainer.data.left_out import LeftOut, Reason
from trainer.data.listing import NO_LABEL, Listing
from trainer.data.manifest import is_packed
from trainer.data.packed import PackedImages
from trainer.data.pixels import IMAGENET, MINUS_ONE_TO_ONE, PixelScale, measured
from trainer.data.reading import Reading, read_source
from trainer.data.synthetic import NUM_CHANNELS, SyntheticImages
from trainer.torchvision_schemas import import_module
from weightserver.common.logs import Remark, say
from weightserver.common.object_store import shown
from weightserver.torch import RangesOrder

SYSTEM_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
CACHE_DIRECTORY = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pic-weightserver")
DEBIAN_PACKAGE = "dataset-fashion-mnist"
CONNECT_TIMEOUT_SECONDS = 10.0
_DIGESTED_IMAGES = 1_000
"""Number of images in memory, evenly spread, that the digest of a data set covers."""

# File, number of axes, MD5 of the decompressed Fashion-MNIST file (independent of its compression).
_FILES = {
    "train-images-idx3-ubyte": (3, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    "train-labels-idx1-ubyte": (1, "9018921c3c673c538a1fc5bad174d6f9"),
    "t10k-images-idx3-ubyte": (3, "8181f5470baa50b63fa0f6fddb340f0a"),
    "t10k-labels-idx1-ubyte": (1, "15d484375f8d13e6eb1aabb0c3f46965"),
}

_FASHION = ("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


class TrainImages(Protocol):
    """N training images: a tensor uint8 [N, C, H, W], or an equivalent for images that do not fit into memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, ids: Tensor | slice, /) -> Tensor:
        """Images uint8 [n, C, H, W] of ids int64 [n] in 0..N-1."""

    @property
    def shape(self) -> torch.Size:
        """N, C, H, W."""

    def to(self, device: torch.device, /) -> "TrainImages":
        """The same images on `device`; ids are on `device` too."""


NO_TEST_IMAGES = "this data set has no test images"
_FEWEST_TO_HOLD_OUT = 100
"""Training images of which a tenth can stand for test images."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Images and, except for generated ones, their labels. Training never reads a label; evaluation does."""

    train_images: TrainImages
    """uint8 [N, C, H, W]; for decoded images, their centre squares."""
    train_labels: LabelsField = LabelsField()  # noqa: RUF009 - a descriptor
    """int64 [N], or [0] without labels, and then without test images. Stored labels are read when needed."""
    test_images: TrainImages
    """uint8 [M, C, H, W]; no setting is ever chosen on these."""
    test_labels: Tensor
    """int64 [M]; `NO_LABEL` for images that evaluation leaves out."""
    range_sizes: tuple[int, ...] = ()
    """Numbers of images in the ranges in which they were added; empty if all were added at once."""
    digests: tuple[str, ...] = ()
    """One for each of `ranges`, which identifies its images; empty if the settings alone do."""
    test_digests: tuple[str, ...] = ()
    """The same for the test images."""
    class_names: tuple[str, ...] = ()
    """Name of each label; empty if the labels have no names."""
    order_seed: int | None = None
    """Seed of the order in which the images are stored; None if any order will do."""
    evaluated_side: int | None = None
    """Side of the centre square that evaluation uses; None for the whole image."""
    untested: str = NO_TEST_IMAGES
    """The reason why there are no test images."""
    reading: Reading | None = None
    """What the images' source was read as; None for a pack and for a data set by name."""
    whole: "Dataset | None" = None
    """The data set whose first images are trained on; None if all are."""

    @property
    def ranges(self) -> tuple[int, ...]:
        """Numbers of images in the ranges in which they were added."""
        return self.range_sizes or (len(self.train_images),)

    @property
    def pixels(self) -> PixelScale:
        """The scale for encoders of these images: their own for images in memory, ImageNet's for decoded ones."""
        if isinstance(self.train_images, Tensor):
            return measured(self.train_images)
        return MINUS_ONE_TO_ONE if isinstance(self.train_images, SyntheticImages) else IMAGENET

    @property
    def evaluated(self) -> "Dataset":
        """The images and labels that evaluation uses: all that have a label, also if only the first ones are trained
        on."""
        whole = self.whole or self
        if not whole.labelled:
            return whole
        train = _with_labels(whole.train_images, whole.train_labels)
        test = _with_labels(whole.test_images, whole.test_labels)
        return replace(whole, train_images=train[0], train_labels=train[1], test_images=test[0], test_labels=test[1])

    def images(self, ids: Tensor) -> TrainImages:
        """Some of the training images, int64 [n]."""
        return _chosen(self.train_images, ids)

    @property
    def labelled(self) -> bool:
        return len(vars(self)["train_labels"]) > 0  # without reading stored ones

    @property
    def can_hold_out(self) -> bool:
        """Whether there are no test images, and enough training images that some can stand for them."""
        none_given = not len(self.test_images) and self.untested == NO_TEST_IMAGES
        if not (none_given and self.labelled and len(self.train_images) >= _FEWEST_TO_HOLD_OUT):
            return False
        return int((self.train_labels != NO_LABEL).sum()) >= _FEWEST_TO_HOLD_OUT

    def check_labelled(self, *, tested: bool = False) -> None:
        """Raises ValueError without labels to evaluate with, or, if `tested`, without test images."""
        if not self.labelled:
            kind = "generated" if isinstance(self.train_images, SyntheticImages) else "these"
            raise ValueError(f"{kind} images have no labels: train without evaluations, or choose another --dataset")
        if tested and not len(self.test_images):
            few = f", and none are held out of fewer than {_FEWEST_TO_HOLD_OUT} images with labels"
            why = self.untested + few * (self.untested == NO_TEST_IMAGES and not self.can_hold_out)
            raise ValueError(f"{why}: train with --no-evaluate, or add matching ones")

    def check_evaluated(self, *, trained_on_labels: bool) -> None:
        """Raises ValueError unless the end of a run can be evaluated: on test images, or on held-out training images if
        there are none and their labels were not trained on."""
        self.check_labelled(tested=trained_on_labels or not self.can_hold_out)

    def strict(self) -> "Dataset":
        """The same images for evaluations: a broken test image is an error, training images are as in training.

        Raises:
            ValueError: a test image was broken when it was packed.
        """
        if not isinstance(self.test_images, DecodedImages) or not len(self.test_images):
            return self
        stored = vars(self)["train_labels"]  # without reading them
        return replace(self, test_images=self.test_images.strict(), train_labels=stored)

    def first(self, num_images: int) -> "Dataset":
        """The images of the first ranges, as before others were added; all images if no ranges have that many."""
        ends = list(itertools.accumulate(self.range_sizes))
        if num_images not in ends or not isinstance(self.train_images, DecodedImages):
            return self
        return replace(
            self,
            train_images=self.train_images.first(num_images),
            train_labels=StoredLabels(num_images if self.labelled else 0, lambda: self.train_labels[:num_images]),
            range_sizes=self.range_sizes[: ends.index(num_images) + 1],
            digests=self.digests[: ends.index(num_images) + 1],
        )

    def order(self, order_seed: int) -> RangesOrder:
        """The map between rows and images. Raises ValueError if the images are stored in another seed's order."""
        if self.order_seed not in (None, order_seed):
            raise ValueError(
                f"the images are packed in the order of seed {self.order_seed}, not {order_seed}: "
                f"give --order-seed {self.order_seed}, or pack them again"
            )
        return RangesOrder(self.ranges, order_seed)


def _with_labels(images: TrainImages, labels: Tensor) -> tuple[TrainImages, Tensor]:
    """The images that have a label, and their labels."""
    if not len(labels) or labels.min() >= 0:
        return images, labels
    kept = torch.nonzero(labels >= 0)[:, 0]
    return _chosen(images, kept), labels[kept]


def _chosen(images: TrainImages, ids: Tensor) -> TrainImages:
    return images.chosen(ids.numpy()) if isinstance(images, DecodedImages) else images[ids]


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
            raise ValueError(f"{directory} holds packed images, not a folder of images: give --dataset packed")
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
    return Stored(images, labels, classes, tuple(map(_digest, contents)))


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


def _load_idx(directory: Path | None) -> Dataset:
    if directory is None:
        raise ValueError("data set 'idx' needs a folder: give --data-dir with the four idx files")
    return _read_directory(directory, verify=False)


def _load_fashion_mnist(directory: Path | None) -> Dataset:
    if directory is not None:
        return _read_directory(directory, verify=True)
    downloaded = CACHE_DIRECTORY / "FashionMNIST" / "raw"
    for place in (SYSTEM_DIRECTORY, downloaded):
        if all(find_idx(place, name) for name in _FILES):
            return _read_directory(place, verify=True)
    failures = [f"no copy in {SYSTEM_DIRECTORY}"]
    try:
        _download("FashionMNIST", "Fashion-MNIST")
        return _read_directory(downloaded, verify=True)
    except (OSError, RuntimeError, URLError) as error:
        failures.append(f"download failed ({_one_line(error)})")
    raise ValueError(
        f"fashion-mnist not found: {'; '.join(failures)}. Install the Debian package {DEBIAN_PACKAGE}, or put the four "
        ".gz files of github.com/zalandoresearch/fashion-mnist into a folder and give it as --data-dir"
    )


def _read_directory(directory: Path, *, verify: bool) -> Dataset:
    if not directory.is_dir():
        raise ValueError(f"no such folder: {directory}: give the folder that holds {', '.join(_FILES)} (or .gz)")
    arrays: dict[str, Tensor] = {}
    for name, (num_axes, md5) in _FILES.items():
        path = find_idx(directory, name)
        if path is None:
            raise ValueError(f"{directory} holds neither {name}.gz nor {name}: put the four idx files there")
        arrays[name] = torch.from_numpy(read_idx(path, num_axes, md5 if verify else None).copy())
    train_images, train_labels, test_images, test_labels = arrays.values()
    for images, labels, kind in ((train_images, train_labels, "training"), (test_images, test_labels, "test")):
        if len(images) != len(labels) or len(images) == 0:
            raise ValueError(
                f"{directory} has {len(images)} {kind} images but {len(labels)} labels: restore the original files"
            )
    names = _FASHION if verify else ()
    return _in_memory(train_images[:, None], train_labels.long(), test_images[:, None], test_labels.long(), names)


def _load_cifar(directory: Path | None) -> Dataset:
    if directory is not None:
        return _in_memory(*read_cifar(directory), CIFAR_CLASSES)
    try:
        _download("CIFAR10", "CIFAR-10")
    except (OSError, RuntimeError, URLError) as error:
        raise ValueError(
            f"cifar-10 not found: download failed ({_one_line(error)}). Put torchvision's cifar-10-batches-py or the "
            "binary version of www.cs.toronto.edu/~kriz/cifar.html into a folder and give it as --data-dir"
        ) from error
    return _in_memory(*read_cifar(CACHE_DIRECTORY), CIFAR_CLASSES)


def _in_memory(
    train_images: Tensor, train_labels: Tensor, test_images: Tensor, test_labels: Tensor, class_names: tuple[str, ...]
) -> Dataset:
    return Dataset(
        class_names=class_names,
        digests=_digests_of(train_images),
        test_digests=_digests_of(test_images),
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
    )


def _digests_of(images: Tensor) -> tuple[str]:
    some = images[:: -(-len(images) // _DIGESTED_IMAGES)]
    return (_digest(some.numpy().tobytes()),)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _download(name: str, title: str) -> None:
    """Downloads a data set by torchvision, which verifies each archive and keeps what it has; fails fast without a
    network."""
    say(Remark(f"downloading {title} into {CACHE_DIRECTORY}", directory=str(CACHE_DIRECTORY)))
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_TIMEOUT_SECONDS)
    try:
        getattr(import_module("torchvision.datasets"), name)(CACHE_DIRECTORY, download=True)
    finally:
        socket.setdefaulttimeout(before)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


DATASETS: dict[str, Callable[[Path | None], Dataset]] = {
    "fashion-mnist": _load_fashion_mnist,
    "cifar-10": _load_cifar,
    "idx": _load_idx,
}
"""Labelled data sets that are loaded into memory."""
SYNTHETIC = "synthetic"
