"""Surveys images before training: how many, how large, with which labels; a sample is read."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from trainer.data.datasets import Dataset
from trainer.data.decoded_images import DecodedImages
from trainer.data.inspection import pixel_warnings, spread_evenly

_SAMPLE = 256
_LOOKED_AT = 16
"""Images of the sample whose pixels are looked at."""


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
    headers = [images.header(image) for image in sample.tolist()]
    unreadable = tuple(header for header in headers if isinstance(header, str))
    if not packed:
        unreadable = tuple(dict.fromkeys((*unreadable, *map(str, images.intact(sample)[2]))))
    intact = [header for header in headers if not isinstance(header, str)]
    if number == 1 or (len(headers) == number and len(intact) == 1):
        raise ValueError(f"a single image that can be read, of {number:,}: give at least 2, to compare with each other")
    if not intact:
        raise ValueError(f"none of {len(headers)} sampled images can be read, first {unreadable[0]}: repair them")
    most, estimate = images.max_broken, len(unreadable) * number // len(sample)
    if estimate > most:
        images.list_broken(sample)
        raise ValueError(
            f"about {estimate:,} of {number:,} images are broken ({len(unreadable):,} of {len(sample):,} that were "
            f"read, first {unreadable[0]}), and {most:,} may be: repair or remove them, or give --max-broken "
            f"{2 * estimate}; --broken-list FILE has the paths of those that were read"
        )
    return ImagesSurvey(
        number=number,
        shorter_side=round(statistics.median(min(header.width, header.height) for header in intact)),
        pixels=round(statistics.median(header.width * header.height for header in intact)),
        image_bytes=round(statistics.mean(header.num_bytes for header in intact)),
        num_classes=len(torch.unique(labels[labels >= 0])) if dataset.labelled else 0,
        num_tests=len(dataset.test_images),
        can_hold_out=dataset.can_hold_out,
        packed=packed,
        unreadable=unreadable,
        max_broken=most,
        warnings=tuple(pixel_warnings([one for image in sample[:_LOOKED_AT].tolist() if (one := images.facts(image))])),
    )
