"""Samples images before they are trained on or packed: how many are broken, how large they are, with which labels."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from trainer.data.config import SourceOptions
from trainer.data.dataset import Dataset
from trainer.data.decode import COLOUR, GREY, SHALLOW, ImageFacts
from trainer.data.decoded_images import DecodedImages
from trainer.data.listing import NO_LABEL
from weightserver.common.logs import Remark
from weightserver.torch import ClassOrder

_SAMPLE, _LARGE_SAMPLE = 256, 4_096
_DARK = {
    # masks, labels of few classes, values 0..1 that were rounded; no set of dark photographs is as dark
    SHALLOW: (31, 0.9, 255, "nearly black: name the images' folder if these are masks or labels, or store 0 to 255"),
    # 12 bits and less; a few images may have brighter pixels
    GREY: (32_767, 0.75, 65_535, "dark: --pixel-range 0 {range} uses their range"),
    COLOUR: (32_767, 0.75, 65_535, "dark: the higher 8 bits are read; --pixel-range is for grey images: store 8 bits"),
}
"""For each depth: the largest value of dark images, their least share, the largest value of all, and what to do."""


class Sample(NamedTuple):
    """Images that were decoded, spread evenly over the ids of all."""

    number: int
    """Number of images that they are a sample of."""
    options: SourceOptions
    intact: list[ImageFacts]
    broken: list[Remark]
    """A line for each image that cannot be read."""

    @property
    def decoded(self) -> int:
        return len(self.intact) + len(self.broken)

    @property
    def shorter_side(self) -> float:
        """Pixels of an image's shorter side, the median."""
        return statistics.median(min(one.width, one.height) for one in self.intact)

    @property
    def num_broken(self) -> int:
        """Number of broken images among all, estimated."""
        return len(self.broken) * self.number // self.decoded

    @property
    def max_broken(self) -> int:
        """Number of broken images beyond which a run or a pack ends."""
        return self.options.limit_of_broken(self.number)

    def lines(self) -> Iterator[str]:
        """For people: the range of values for each depth of pixels, with a warning if most images use few of them, and
        a line for a fourth band that is taken for opacity."""
        for depth, (most, share, whole, advice) in _DARK.items():
            if not (values := [one.values for one in self.intact if one.depth == depth]):
                continue
            few = [one for one in values if one[1] <= most]
            is_dark = len(few) >= share * len(values)
            lows, highs = zip(*(few if is_dark else values), strict=True)
            top = max(highs)
            of = f" of {whole:,}" if top <= whole else ""
            line = f"values: {min(lows):,} to {top:,}{of} in {len(lows):,} of {len(values):,} sampled images of {depth}"
            if is_dark and not (depth == GREY and self.options.pixel_range):
                line += f", which are shown {advice.format(range=(1 << top.bit_length()) - 1)}"
            yield line
        if self.options.alpha != "ignore" and (bands := sum(one.fourth_band for one in self.intact)):
            yield f"{bands:,} sampled TIFFs have a fourth band, which is taken for opacity: --alpha ignore if it is not"


def sample(images: DecodedImages, most: int = _SAMPLE) -> Sample:
    """Decodes up to `most` images."""
    ids = np.unique(np.linspace(0, len(images) - 1, most).astype(np.int64))
    return Sample(len(images), images.options, *images.facts(ids))


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
    shared: ClassOrder | None = None
    """The classes that --labels gives the images to train on; None if each is its own."""
    can_hold_out: bool = False
    """Whether there are no test images, and training images can stand for them (`Dataset.can_hold_out`): none that
    are trained on with labels."""
    packed: bool = False
    """Whether the images are packed."""

    @property
    def total_bytes(self) -> int:
        """Size of all encoded images, estimated from the sample."""
        return self.number * self.image_bytes


def checked_sample(images: DecodedImages) -> Sample:
    """Decodes a sample of images that are to be trained on or packed.

    Raises:
        ValueError: none of them can be read, or so few that a run or a pack would end.
    """
    found = sample(images)
    if found.num_broken > found.max_broken:  # perhaps by chance: one percent are 2.56 of a sample
        found = sample(images, _LARGE_SAMPLE)
    if not found.intact:
        raise ValueError(f"none of {found.decoded} sampled images can be read, first {found.broken[0]}: repair them")
    if found.num_broken > found.max_broken:
        images.broken.list(found.broken)
        raise ValueError(
            f"about {found.num_broken:,} of {found.number:,} images are broken ({len(found.broken):,} of "
            f"{found.decoded:,} that were read, first {found.broken[0]}), and {found.max_broken:,} may be: repair or "
            f"remove them, or give --max-broken {2 * found.num_broken}; --broken-list FILE has the paths of those that "
            "were read"
        )
    return found


def survey(dataset: Dataset, *, packed: bool, shared: ClassOrder | None = None) -> tuple[ImagesSurvey, Sample]:
    """Surveys the training images of a data set of decoded images, of which a sample is read.

    Raises:
        ValueError: a single image, or as `checked_sample`.
    """
    images = dataset.train_images
    assert isinstance(images, DecodedImages), "images in memory need no survey"
    labels = dataset.train_labels if dataset.labelled else torch.empty(0)
    found = checked_sample(images)
    if found.number == 1 or (found.decoded == found.number and len(found.intact) == 1):
        number = f"{found.number:,}"
        raise ValueError(f"a single image that can be read, of {number}: give at least 2, to compare with each other")
    facts = ImagesSurvey(
        number=found.number,
        shorter_side=round(found.shorter_side),
        pixels=round(statistics.median(one.width * one.height for one in found.intact)),
        image_bytes=round(statistics.mean(one.num_bytes for one in found.intact)),
        num_classes=len(torch.unique(labels[labels >= 0])) if dataset.labelled else 0,
        num_tests=int((dataset.test_labels != NO_LABEL).sum()),
        shared=shared,
        can_hold_out=dataset.can_hold_out and shared is None,
        packed=packed,
    )
    return facts, found
