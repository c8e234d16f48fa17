"""Common parts of the protocols: the split of held-out training images, and the result."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.data import Dataset

NUM_HELD_OUT = 5_000
_FEWEST = 10
"""Training images of which a tenth is an image."""
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The result of one protocol for one set of features."""

    top1: float
    """Accuracy on the test images, in percent."""
    setting: float
    """The setting chosen on held-out training images: k, or the strength of regularisation."""
    top5: float
    """Percentage of test images whose class is among the five likeliest."""
    held_out_top1: float
    """Accuracy with that setting on the held-out training images, in percent."""


def split_held_out(num_images: int) -> tuple[Tensor, Tensor]:
    """Indexes, int64, of the training images to fit on and of those held out; the same for all features.

    5,000 are held out, or a tenth if that is fewer.
    """
    if num_images < _FEWEST:
        raise ValueError(f"{num_images} labelled training images are too few to hold some out: give {_FEWEST} or more")
    order = _shuffled(num_images)
    num_held_out = min(NUM_HELD_OUT, num_images // 10)
    return order[num_held_out:], order[:num_held_out]


def splits_held_out(num_images: int) -> list[tuple[Tensor, Tensor]]:
    """The split of `split_held_out` alone, or, of fewer than 10 images, one split for each image."""
    return [split_held_out(num_images)] if num_images >= _FEWEST else split_folds(num_images, num_images)


def split_folds(num_images: int, num_folds: int) -> list[tuple[Tensor, Tensor]]:
    """Splits for cross-validation, in which each image is held out once."""
    if num_images < num_folds:
        raise ValueError(f"{num_images} training images are too few for {num_folds} folds: each needs one")
    parts = _shuffled(num_images).tensor_split(num_folds)
    return [(torch.cat([*parts[:fold], *parts[fold + 1 :]]), parts[fold]) for fold in range(num_folds)]


def split_tests(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Indexes, int64, of labelled training images to fit on, and of those that stand for missing test images.

    As many as of `split_held_out`, of each class in proportion.
    """
    order = _shuffled(len(labels))
    by_class = order[torch.argsort(labels[order], stable=True)]
    count = min(NUM_HELD_OUT, len(labels) // 10)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[(2 * torch.arange(count) + 1) * len(labels) // (2 * max(count, 1))] = True
    return by_class[~is_test], by_class[is_test]


def with_held_out(dataset: Dataset) -> Dataset:
    """A data set of labelled images without test images, with a tenth of its training images in their place: those that
    the end of a run without test images is evaluated on."""
    fitted, held_out = split_tests(dataset.train_labels)
    return replace(
        dataset,
        train_images=dataset.images(fitted),
        train_labels=dataset.train_labels[fitted],
        test_images=dataset.images(held_out),
        test_labels=dataset.train_labels[held_out],
    )


def _shuffled(num_images: int) -> Tensor:
    """The images' indexes, int64, in an order that is always the same."""
    return torch.randperm(num_images, generator=torch.Generator().manual_seed(_SEED))


def percent_correct(predictions: Tensor, labels: Tensor) -> float:
    """Accuracy of int64 [n] against int64 [n], in percent."""
    return 100.0 * (predictions == labels).double().mean().item()


def num_correct(best: Tensor, labels: Tensor) -> Tensor:
    """Numbers of images whose class is the first of the `best`, int64 [n, k], and is among them: float64 [2]."""
    is_correct = (best.cpu() == labels[:, None]).double()
    return torch.stack([is_correct[:, 0].sum(), is_correct.sum()])


def check_classes(dataset: Dataset, *, held_out: bool = False) -> None:
    """Raises ValueError for images without labels or test images, one class, or test classes that training lacks, which
    images that are `held_out` of training images may have."""
    if not dataset.labelled:
        raise ValueError("these images have no labels: choose another --dataset")
    if not len(dataset.test_images):
        raise ValueError(f"{dataset.untested}: add matching ones, or choose another --dataset")
    train, test = torch.unique(dataset.train_labels), torch.unique(dataset.test_labels)
    if len(train) < 2:
        raise ValueError("all training images are of one class: give images of at least two classes")
    if not held_out and len(unknown := test[~torch.isin(test, train)]):
        raise ValueError(
            f"{len(unknown)} classes of the test images, such as {int(unknown[0])}, have no training image: "
            "give test images of the training images' classes"
        )
