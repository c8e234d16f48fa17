"""Random resized crops: the distribution of torchvision's RandomResizedCrop, as a function of uniform numbers.

The first shape that fits must not depend on the processor: one unit in the last place could choose another. Crops are
therefore whole pixels, computed on the host in float64 from sums, products, quotients and square roots only, which IEEE
754 rounds identically everywhere. NumPy's `exp` and `log` differ between its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cache

import numpy as np
from numpy.typing import NDArray

from trainer.data.decode import Box
from weightserver.core.arrays import Float32Array, Float64Array

NUM_TRIES = 10
"""Number of shapes to try before taking the centre, as in torchvision."""
_HALVINGS, _TERMS = 5, 12


@dataclass
class RandomCrop:
    """One visit's crop of an image of unknown size: a function of its width and height."""

    areas: Sequence[float]
    """Areas of the shapes to try in turn, as fractions of the image."""
    ratios: Sequence[float]
    """Ratios of width to height of the same shapes."""
    left: float
    """Position of the crop within its possible range, in [0, 1); `top` likewise."""
    top: float
    flipped: bool
    max_ratio: float

    def __call__(self, width: int, height: int) -> Box:
        """The first shape that fits into width × height pixels, otherwise the largest centred one with a valid ratio.

        Sides are rounded to whole pixels before they are compared with the image's.
        """
        for area, ratio in zip(self.areas, self.ratios, strict=True):
            pixels = area * (width * height)
            crop_width, crop_height = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                left, top = int(self.left * (width - crop_width + 1)), int(self.top * (height - crop_height + 1))
                break
        else:
            crop_width = min(width, round(height * self.max_ratio))
            crop_height = min(height, round(width * self.max_ratio))
            left, top = (width - crop_width) // 2, (height - crop_height) // 2
        return Box(left, top, left + crop_width, top + crop_height, self.flipped)


def draw_crops(
    areas: Float32Array,
    ratios: Float32Array,
    lefts: Float32Array,
    tops: Float32Array,
    flipped: NDArray[np.bool_],
    *,
    scale: tuple[float, float],
    max_ratio: float,
) -> list[RandomCrop]:
    """The crops of n visits, from uniform numbers in [0, 1).

    `areas` and `ratios` [n, NUM_TRIES]: a crop's area is uniform within `scale`, its ratio log-uniform between
    1/max_ratio and max_ratio. `lefts`, `tops` and `flipped` are [n].
    """
    area = scale[0] + (scale[1] - scale[0]) * areas.astype(np.float64)
    ratio = _exp((2 * ratios.astype(np.float64) - 1) * _log(max_ratio))
    # lists, because NumPy is slow with the few numbers of one image
    each = zip(area.tolist(), ratio.tolist(), lefts.tolist(), tops.tolist(), flipped.tolist(), strict=True)
    return [RandomCrop(*numbers, max_ratio) for numbers in each]


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
