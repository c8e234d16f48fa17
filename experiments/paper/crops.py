"""Random crops of labelled images, and the batches of them that a training takes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from experiments.paper.cityscapes import IGNORED, LabelledImage, UInt8Array, read_pair
from trainer.cores import decode_threads
from trainer.schedule import visit_uniforms
from weightserver.common.background import computed_ahead
from weightserver.core.arrays import Float32Array
from weightserver.torch import Ranks, VisitSchedule

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
NUM_UNIFORMS = 4
"""Random numbers of a crop."""


@dataclass(frozen=True, kw_only=True)
class RandomCrops:
    """Crops of images scaled by a random factor, half of them flipped."""

    side: int
    """Side of a crop, in pixels."""
    scales: tuple[float, float]
    """Smallest and largest factor."""
    fill: tuple[int, ...]
    """Colour of the padding, whose label is IGNORED."""

    def crop(self, pair: LabelledImage, uniforms: Float32Array) -> tuple[UInt8Array, UInt8Array]:
        """Crops an image by float32 [NUM_UNIFORMS] in [0, 1), which choose scale, row, column and flip.

        Returns pixels uint8 [3, side, side] and their labels uint8 [side, side], 0..18 or IGNORED, padded where the
        scaled image is smaller. Only the cropped part is resized: bilinearly with antialiasing, labels to the
        nearest pixel.

        Raises:
            ValueError: a file is damaged, or has an unknown label id.
        """
        image, classes_of_pixels = read_pair(pair)
        labels = Image.fromarray(classes_of_pixels)
        size, box = self._box(image.size, uniforms)
        pixels = np.empty((self.side, self.side, 3), np.uint8)
        pixels[:] = self.fill
        pixels[: size[1], : size[0]] = np.asarray(image.resize(size, Image.Resampling.BILINEAR, box=box))
        classes = np.full((self.side, self.side), IGNORED, np.uint8)
        classes[: size[1], : size[0]] = np.asarray(labels.resize(size, Image.Resampling.NEAREST, box=box))
        if uniforms[3] < 0.5:
            pixels, classes = pixels[:, ::-1], classes[:, ::-1]
        return pixels.transpose(2, 0, 1), classes

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


def crops_ahead(
    images: Sequence[LabelledImage], crops: RandomCrops, batch_size: int, ranks: Ranks, *, seed: int, steps: range
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """This rank's part of each step's batch: uint8 [b, 3, side, side] and the labels uint8 [b, side, side].

    A function of the seed and the step; every epoch shuffles the images. Threads crop ahead: close the generator to end
    them.
    """
    count, share = len(images), ranks.share(batch_size)
    order = VisitSchedule(num_rows=count, window_size=count, window_stride=count, seed=seed)

    def cropped(visit: int) -> tuple[UInt8Array, UInt8Array]:
        (image,) = order.visits(visit, visit + 1)
        return crops.crop(images[image], visit_uniforms(seed, np.array([visit]), NUM_UNIFORMS)[0])

    visits = (range(batch_size * step, batch_size * (step + 1))[share] for step in steps)
    with closing(decoded_ahead(cropped, visits)) as ahead:
        for part in ahead:
            pixels, labels = zip(*part, strict=True)
            yield torch.from_numpy(np.stack(pixels)), torch.from_numpy(np.stack(labels))


def decoded_ahead(
    function: Callable[[_Item], _Result], batches: Iterable[Sequence[_Item]]
) -> Generator[list[_Result], None, None]:
    """function(item) of each item of each batch, by threads, two batches ahead. Close the generator to end them."""
    with ThreadPoolExecutor(decode_threads(), thread_name_prefix="decode") as pool:
        results = ([*pool.map(function, batch)] for batch in batches)
        with closing(computed_ahead(results, ahead=2, name="batches")) as ahead:
            yield from ahead
