"""Surveys images before training: how many, how large, with which labels; only headers of a sample are read."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.datasets import Dataset
from trainer.data.decoded_images import DecodedImages

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

    @property
    def total_bytes(self) -> int:
        """Size of all encoded images, estimated from the sample."""
        return self.number * self.image_bytes


def survey(dataset: Dataset, *, packed: bool) -> ImagesSurvey:
    """Surveys the training images of a data set of decoded images; the sample is spread evenly over their ids.

    Raises:
        ValueError: none of the sampled images can be read.
    """
    images = dataset.train_images
    assert isinstance(images, DecodedImages), "images in memory need no survey"
    number = len(images)
    headers = [images.header(image) for image in np.unique(np.linspace(0, number - 1, _SAMPLE).astype(int)).tolist()]
    unreadable = tuple(header for header in headers if isinstance(header, str))
    intact = [header for header in headers if not isinstance(header, str)]
    if number == 1 or (len(headers) == number and len(intact) == 1):
        raise ValueError(f"a single image that can be read, of {number:,}: give at least 2, to compare with each other")
    if not intact:
        raise ValueError(f"none of {len(headers)} sampled images can be read, first {unreadable[0]}: repair them")
    return ImagesSurvey(
        number=number,
        shorter_side=round(statistics.median(min(header.width, header.height) for header in intact)),
        pixels=round(statistics.median(header.width * header.height for header in intact)),
        image_bytes=round(statistics.mean(header.num_bytes for header in intact)),
        num_classes=len(torch.unique(dataset.train_labels)) if dataset.labelled else 0,
        num_tests=len(dataset.test_images),
        can_hold_out=dataset.can_hold_out,
        packed=packed,
        unreadable=unreadable,
    )
