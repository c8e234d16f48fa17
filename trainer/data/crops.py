"""Random resized crops: the distribution of torchvision's RandomResizedCrop, as a function of uniform numbers.

The first shape that fits must not depend on the processor: one unit in the last place could choose another. Crops are
therefore whole pixels, computed on the host in float64 from sums, products, quotients and square roots only, which IEEE
754 rounds identically everywhere. NumPy's `exp` and `log` differ between its kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cache

import numpy as np
from numpy.typing import NDArray

from trainer.data.decode import Box
from weightserver.core.arrays import Float32Array, Float64Array, Int64Array

NUM_TRIES = 10
"""Number of shapes to try before taking the centre, as in torchvision."""
_HALVINGS, _TERMS = 5, 12


@dataclass(frozen=True, eq=False)
class RandomCrops:
    """The crops of n visits, each a function of its image's width and height."""

    areas: Float64Array
    """Areas of the shapes to try in turn, as fractions of the image: [n, NUM_TRIES]."""
    ratios: Float64Array
    """Ratios of width to height of the same shapes."""
    lefts: Float64Array
    """Position of the crop within its possible range, in [0, 1): [n]; `tops` likewise."""
    tops: Float64Array
    flipped: NDArray[np.bool_]
    max_ratio: float

    def box(self, place: int, width: int, height: int) -> Box:
        """One of `boxes`, for which NumPy would take thirty times as long."""
        for area, ratio in zip(self.areas[place].tolist(), self.ratios[place].tolist(), strict=True):
            pixels = area * (width * height)
            crop_width, crop_height = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                left = int(self.lefts[place] * (width - crop_width + 1))
                top = int(self.tops[place] * (height - crop_height + 1))
                break
        else:
            crop_width, crop_height = self._largest(width, height)
            left, top = (width - crop_width) // 2, (height - crop_height) // 2
        return Box(left, top, left + crop_width, top + crop_height, bool(self.flipped[place]))

    def _largest(self, width: int, height: int) -> tuple[int, int]:
        """Sides of the largest crop with a valid ratio."""
        return min(width, round(height * self.max_ratio)), min(height, round(width * self.max_ratio))

    def boxes(self, width: int, height: int) -> Int64Array:
        """Left, top, right, bottom and whether it is flipped, of each crop of images of one size: [n, 5].

        The first shape that fits into width × height pixels, otherwise the largest centred one with a valid ratio.
        Sides are rounded to whole pixels before they are compared with the image's.
        """
        pixels = self.areas * (width * height)
        widths = np.rint(np.sqrt(pixels * self.ratios)).astype(np.int64)
        heights = np.rint(np.sqrt(pixels / self.ratios)).astype(np.int64)
        fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        chosen = np.arange(len(fits)), fits.argmax(axis=1)
        fitted = fits[chosen]
        largest_width, largest_height = self._largest(width, height)
        widths = np.where(fitted, widths[chosen], largest_width)
        heights = np.where(fitted, heights[chosen], largest_height)
        lefts = np.where(fitted, (self.lefts * (width - widths + 1)).astype(np.int64), (width - widths) // 2)
        tops = np.where(fitted, (self.tops * (height - heights + 1)).astype(np.int64), (height - heights) // 2)
        return np.stack([lefts, tops, lefts + widths, tops + heights, self.flipped], axis=1)


def draw_crops(
    areas: Float32Array,
    ratios: Float32Array,
    lefts: Float32Array,
    tops: Float32Array,
    flipped: NDArray[np.bool_],
    *,
    scale: tuple[float, float],
    max_ratio: float,
) -> RandomCrops:
    """The crops of n visits, from uniform numbers in [0, 1).

    `areas` and `ratios` [n, NUM_TRIES]: a crop's area is uniform within `scale`, its ratio log-uniform between
    1/max_ratio and max_ratio. `lefts`, `tops` and `flipped` are [n].
    """
    area = scale[0] + (scale[1] - scale[0]) * areas.astype(np.float64)
    ratio = _exp((2 * ratios.astype(np.float64) - 1) * _log(max_ratio))
    return RandomCrops(area, ratio, lefts.astype(np.float64), tops.astype(np.float64), flipped, max_ratio)


@cache
def _log(number: float) -> float:
    """ln to the nearest float, by decimal arithmetic."""
    return float(Decimal(number).ln(Context(prec=40)))


def _exp(exponent: Float64Array) -> Float64Array:
    """eˣ, to 1e-14 of itself for |x| ≤ 7: the Taylor polynomial of x/32 by Horner's scheme, squared five times."""
    small = exponent / 2**_HALVINGS
    result: Float64Array = np.ones_like(small)
    for term in range(_TERMS, 0, -1):
        result = 1 + result * small / term
    for _ in range(_HALVINGS):
        result = result * result
    return result
