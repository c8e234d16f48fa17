"""A data set: images and labels, in memory or decoded for each use."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trainer.data.decoded_images import DecodedImages
from trainer.data.listing import NO_LABEL
from trainer.data.pixels import IMAGENET, MINUS_ONE_TO_ONE, PixelScale, measured
from trainer.data.reading import Reading
from trainer.data.synthetic import SyntheticImages
from weightserver.torch import RangesOrder

NO_TEST_IMAGES = "this data set has no test images"
_FEWEST_TO_HOLD_OUT = 100
"""Training images of which a tenth can stand for test images."""


class TrainImages(Protocol):
    """N training images: a tensor uint8 [N, C, H, W], or an equivalent for images that do not fit into memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, ids: Tensor | slice, /) -> Tensor:
        """Images uint8 [n, C, H, W] of ids int64 [n] in 0..N-1."""

    @property
    def shape(self) -> torch.Size:
        """N, C, H, W."""

    def to(self, device: torch.device, /) -> "TrainImages":
        """Copies the images to `device`, where ids have to be too."""


@dataclass(frozen=True)
class StoredLabels:
    """Labels of known number, which are read on first use: training never reads them."""

    count: int
    """N."""
    read: Callable[[], Tensor]
    """Reads the labels, int64 [N]."""

    def __len__(self) -> int:
        return self.count


class LabelsField:
    """A dataclass field that is set to a tensor, int64 [N], or to `StoredLabels`, and always read as a tensor."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: object, labels: Tensor | StoredLabels) -> None:
        vars(instance)[self._name] = labels

    def __get__(self, instance: object, owner: type | None = None) -> Tensor:
        if instance is None:
            raise AttributeError(self._name)  # tells the dataclass that the field has no default
        labels: Tensor | StoredLabels = vars(instance)[self._name]
        if isinstance(labels, StoredLabels):
            labels = vars(instance)[self._name] = labels.read()
        return labels


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Images and, except for generated ones, their labels. Training never reads a label; evaluation does."""

    train_images: TrainImages
    """uint8 [N, C, H, W]; for decoded images, their centre squares."""
    train_labels: LabelsField = LabelsField()
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
    """Digests of the ranges of test images."""
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
        on. Labels of decoded images that are numbers without names, and so may be any, are replaced by 0, 1, …, in
        their order."""
        whole = self.whole or self
        if not whole.labelled:
            return whole
        train = _with_labels(whole.train_images, whole.train_labels)
        test = _with_labels(whole.test_images, whole.test_labels)
        if isinstance(whole.train_images, DecodedImages) and not whole.class_names:
            _, numbers = torch.unique(torch.cat([train[1], test[1]]), return_inverse=True)
            train, test = (train[0], numbers[: len(train[1])]), (test[0], numbers[len(train[1]) :])
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
        """Makes a broken test image an error, for evaluations; training images are as in training.

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
