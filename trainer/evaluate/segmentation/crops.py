"""Random crops of labelled images, and the batches of a training, cropped ahead of their step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer.cores import decode_threads
from trainer.evaluate.segmentation.cityscapes import IGNORED, LabelledImage, UInt8Array, read_image, read_labels
from trainer.schedule import visit_uniforms
from weightserver.common.background import computed_ahead
from weightserver.core.arrays import Float32Array
from weightserver.torch import VisitSchedule

NUM_UNIFORMS = 4
"""Random numbers of a crop."""
_BATCHES_AHEAD = 2


class Crop(NamedTuple):
    """A random crop, padded where the scaled image is smaller."""

    pixels: UInt8Array
    """uint8 [3, side, side]."""
    labels: UInt8Array
    """uint8 [side, side]: 0..18 or IGNORED."""


@dataclass(frozen=True, kw_only=True)
class RandomCrops:
    """Crops of images scaled by a random factor, half of them flipped."""

    side: int
    """Side of a crop, in pixels."""
    scales: tuple[float, float]
    """Smallest and largest factor."""
    fill: tuple[int, ...]
    """Colour of the padding, whose label is IGNORED."""

    def crop(self, pair: LabelledImage, uniforms: Float32Array) -> Crop:
        """Crops an image by float32 [NUM_UNIFORMS] in [0, 1), which choose scale, row, column and flip.

        Only the cropped part is resized: bilinearly with antialiasing, its labels to the nearest pixel.

        Raises:
            ValueError: a file is damaged, or has an unknown label id.
        """
        image, labels = read_image(pair.image), Image.fromarray(read_labels(pair.label))
        size, box = self._box(image.size, uniforms)
        pixels = np.empty((self.side, self.side, 3), np.uint8)
        pixels[:] = self.fill
        pixels[: size[1], : size[0]] = np.asarray(image.resize(size, Image.Resampling.BILINEAR, box=box))
        classes = np.full((self.side, self.side), IGNORED, np.uint8)
        classes[: size[1], : size[0]] = np.asarray(labels.resize(size, Image.Resampling.NEAREST, box=box))
        if uniforms[3] < 0.5:
            pixels, classes = pixels[:, ::-1], classes[:, ::-1]
        return Crop(pixels.transpose(2, 0, 1), classes)

    def _box(
        self, size: tuple[int, int], uniforms: Float32Array
    ) -> tuple[tuple[int, int], tuple[float, float, float, float]]:
        """Width and height of the crop without padding, and its left, top, right and bottom edge in the image."""
        scale = self.scales[0] + (self.scales[1] - self.scales[0]) * float(uniforms[0])
        width, height = (max(1, round(scale * length)) for length in size)
        crop_width, crop_height = min(self.side, width), min(self.side, height)
        top = int(float(uniforms[1]) * (height - crop_height + 1))
        left = int(float(uniforms[2]) * (width - crop_width + 1))
        across, down = size[0] / width, size[1] / height
        box = (left * across, top * down, (left + crop_width) * across, (top + crop_height) * down)
        return (crop_width, crop_height), box


@dataclass(frozen=True, kw_only=True)
class CropBatches:
    """The batches of a training: a function of the seed and the step; every epoch shuffles the images."""

    images: Sequence[LabelledImage]
    crops: RandomCrops
    batch_size: int
    share: slice
    """The part of each batch that is this rank's."""
    seed: int

    def ahead(self, steps: range) -> Generator[tuple[Tensor, Tensor], None, None]:
        """For each step yields uint8 [b, 3, side, side] and the labels uint8 [b, side, side], made ahead by threads.

        Close the generator to end its threads.
        """
        with (
            ThreadPoolExecutor(decode_threads(), thread_name_prefix="crops") as pool,
            closing(computed_ahead(self._batches(steps, pool), ahead=_BATCHES_AHEAD, name="batches")) as batches,
        ):
            yield from batches

    def _batches(self, steps: range, pool: ThreadPoolExecutor) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.images)
        order = VisitSchedule(num_rows=count, window_size=count, window_stride=count, seed=self.seed)
        for step in steps:
            first = step * self.batch_size
            start, stop = first + self.share.start, first + self.share.stop
            images = [self.images[image] for image in order.visits(start, stop)]
            uniforms = visit_uniforms(self.seed, np.arange(start, stop), NUM_UNIFORMS)
            pixels, labels = zip(*pool.map(self.crops.crop, images, uniforms), strict=True)
            yield torch.from_numpy(np.stack(pixels)), torch.from_numpy(np.stack(labels))
