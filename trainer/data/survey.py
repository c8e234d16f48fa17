"""Surveys images before training: how many, how large, with which labels; a sample is read."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from trainer.data.datasets import Dataset
from trainer.data.decoded_images import DecodedImages
from trainer.data.inspection import pixel_warnings, spread_evenly
from trainer.data.listing import NO_LABEL

_SAMPLE = 256


@dataclass(frozen=True, kw_only=True)
class ImagesSurvey:
    """What is known of the images of a folder or pack."""

    number: int
    """N."""
    shorter_side: int
    """Pixels of an image's shorter side, the median of a sample."""
    pixels: int
    """Pixels of an image, the median of a sample."""
    image_bytes: int
    """Mean size of an encoded image of the sample."""
    num_classes: int = 0
    """Number of classes with labels; 0 without labels."""
    num_tests: int = 0
    """Number of labelled test images."""
    can_hold_out: bool = False
    """Whether there are no test images, and training images can stand for them (`Dataset.can_hold_out`)."""
    packed: bool = False
    """Whether the images are packed."""
    unreadable: tuple[str, ...] = ()
    """A line for each image of the sample that is not one; the first ones are to be shown."""
    max_broken: int = 0
    """Number of broken images beyond which the run ends."""
    warnings: tuple[str, ...] = ()
    """Lines about pixels that may not be what they are taken for."""

    @property
    def total_bytes(self) -> int:
        """Size of all encoded images, estimated from the sample."""
        return self.number * self.image_bytes


def survey(dataset: Dataset, *, packed: bool) -> ImagesSurvey:
    """Surveys the training images of a data set of decoded images; the sample is spread evenly over their ids.

    Raises:
        ValueError: none of the sampled images can be read, or so few that a run would end.
    """
    images = dataset.train_images
    assert isinstance(images, DecodedImages), "images in memory need no survey"
    labels = dataset.train_labels if dataset.labelled else torch.empty(0)
    number = len(images)
    sample = spread_evenly(number, _SAMPLE)
    intact, broken = images.facts(sample)
    if number == 1 or (len(sample) == number and len(intact) == 1):
        raise ValueError(f"a single image that can be read, of {number:,}: give at least 2, to compare with each other")
    if not intact:
        raise ValueError(f"none of {len(sample)} sampled images can be read, first {broken[0]}: repair them")
    most, estimate = images.options.limit_of_broken(number), len(broken) * number // len(sample)
    if estimate > most:
        images.broken.list(broken)
        raise ValueError(
            f"about {estimate:,} of {number:,} images are broken ({len(broken):,} of {len(sample):,} that were "
            f"read, first {broken[0]}), and {most:,} may be: repair or remove them, or give --max-broken "
            f"{2 * estimate}; --broken-list FILE has the paths of those that were read"
        )
    return ImagesSurvey(
        number=number,
        shorter_side=round(statistics.median(min(one.width, one.height) for one in intact)),
        pixels=round(statistics.median(one.width * one.height for one in intact)),
        image_bytes=round(statistics.mean(one.num_bytes for one in intact)),
        num_classes=len(torch.unique(labels[labels >= 0])) if dataset.labelled else 0,
        num_tests=int((dataset.test_labels != NO_LABEL).sum()),
        can_hold_out=dataset.can_hold_out,
        packed=packed,
        unreadable=tuple(map(str, broken)),
        max_broken=most,
        warnings=tuple(pixel_warnings(intact, images.options)),
    )
