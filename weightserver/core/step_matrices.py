"""Single SGD updates of a row as 2×2 matrices, and what all products of such matrices share.

The coordinates are (w, z), z = u + κ·w; `Schedule` says why.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Float32Array, Float64Array
from weightserver.core.double_double import Pair, pair, pieces, times, two_sum

LIMIT = 2.0**480
"""A product of two numbers up to this is far from infinite: diverging schedules saturate and never yield inf or NaN."""
_LARGEST_KAPPA = Fraction(2**240)
_TAME = 2.0**30
"""If no entry of a step is beyond this, products of 16 steps stay below the limit."""
_LARGEST_UNIT = 2.0**16
LARGEST = float(np.finfo(np.float32).max)


class Steps:
    """Single updates as matrices in (w, z), for any learning rates of one momentum and weight decay."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        kappa = min(Fraction(weight_decay) / (1 + Fraction(momentum)), _LARGEST_KAPPA)
        self._kappa, self._kappa_pieces = pair(kappa), pieces(kappa, 4)
        self._momentum, self._momentum_pieces = pair(Fraction(momentum)), pieces(Fraction(momentum), 2)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.constants = (float(self._kappa[0]), float(self._momentum[0]), *self._kappa_pieces)
        """What the compiled kernel computes single updates from."""
        # In the norm max(|w|, unit·|z|) a buffer counts for as little as it moves weights, and a weight makes no
        # buffer grow: an update enlarges it by a part of 2·η·λ·m/((1+m)(1−m)), which is little where training is tame.
        self.unit = min((1 - momentum) / (2 * float(kappa)), _LARGEST_UNIT) if kappa else _LARGEST_UNIT
        self.from_norm = max(1.0, 1 / self.unit + float(kappa))
        """max(|w|, |u|) is at most this many times the norm,"""
        self.to_norm = max(1.0, self.unit * (1 + float(kappa)))
        """and the norm this many times max(|w|, |u|)."""

    def log_norm(self, products: Float64Array) -> Float64Array:
        """log2 of the factor by which products in (w, z), [2, 2, ...], may enlarge the norm of a row: [...]."""
        size = np.abs(products)
        larger: Float64Array = np.log2(
            np.maximum(size[0, 0] + size[0, 1] / self.unit, size[1, 0] * self.unit + size[1, 1])
        )
        return larger

    def in_z(self, weight: Float64Array, momentum_buffer: Float64Array) -> Float64Array:
        """Rows as (w, z): [2, n, D]."""
        return np.stack([weight, momentum_buffer + self._kappa[0] * weight])

    def weight_and_momentum(self, rows: Float64Array) -> tuple[Float64Array, Float64Array]:
        """The inverse of `in_z`."""
        return rows[0], rows[1] - self._kappa[0] * rows[0]

    def are_tame(self, rates: Float32Array) -> bool:
        """Whether products of 16 of them need no clipping."""
        (kappa, _), largest = self._kappa, float(rates.max(initial=0))
        return bool((1 + kappa) * (1 + largest) * (2 + largest * kappa) < _TAME)

    def exact(self, rates: Float32Array) -> Pair:
        """The updates with these learning rates (float32 [...]), in double-double: [2, 2, ...]."""
        rate = rates.astype(np.float64)
        cosine, one_more = self._cosines(rate)
        high, low = np.empty((2, 2, *rate.shape)), np.empty((2, 2, *rate.shape))
        high[0, 0], low[0, 0] = cosine
        high[0, 1], low[0, 1] = two_sum(*(rate * -piece for piece in self._momentum_pieces))
        high[1, 0], low[1, 0] = times(self._kappa, one_more)
        high[1, 1], low[1, 1] = times(self._momentum, cosine)
        return high, low

    def rounded(self, rates: Float32Array) -> Float64Array:
        """The same in float64, each entry within a part in 2^52: [2, 2, ...]."""
        rate = rates.astype(np.float64)
        (cosine, _), (one_more, _) = self._cosines(rate)
        matrices = np.empty((2, 2, *rate.shape))
        matrices[0, 0] = cosine
        np.multiply(rate, -self._momentum[0], out=matrices[0, 1])
        np.multiply(one_more, self._kappa[0], out=matrices[1, 0])
        np.multiply(cosine, self._momentum[0], out=matrices[1, 1])
        return matrices

    def _cosines(self, rate: Float64Array) -> tuple[Pair, Pair]:
        """cos θ = 1 − η·κ and 1 + cos θ."""
        parts = [np.minimum(rate * piece, LIMIT) for piece in self._kappa_pieces]  # exact

        def less_parts(whole: float) -> Pair:
            """whole − η·κ; in this order a difference that nearly vanishes keeps its relative precision."""
            total, low = two_sum(whole, -parts[0])
            total, more = two_sum(total, -parts[1])
            return two_sum(total, low + more - parts[2] - parts[3])

        return less_parts(1), less_parts(2)

    def in_u(self, product: Float64Array) -> Float64Array:
        """Converts products in (w, z), [2, 2, n], to (w, u), in place."""
        kappa = self._kappa[0]
        product[:, 0] += kappa * product[:, 1]
        product[1] -= kappa * product[0]
        return product


def product_of(later: Float64Array, earlier: Float64Array) -> Float64Array:
    """[2, 2, ...] each: product, product, sum, each rounded."""
    product = later[:, 0, None] * earlier[None, 0]
    product += later[:, 1, None] * earlier[None, 1]
    return product


def power_of_two(matrices: Float64Array) -> npt.NDArray[np.int32]:
    """log2 of the divisor that brings the largest entry of each, [2, 2, ...], into [1/2, 1): [...]."""
    exponent: npt.NDArray[np.int32] = np.frexp(np.abs(matrices).max(axis=(0, 1)))[1]
    return exponent


def clip(matrices: Float64Array, limit: float | np.floating) -> Float64Array:
    """Clips to ±limit, in place."""
    np.minimum(matrices, limit, out=matrices)
    return np.maximum(matrices, -limit, out=matrices)


def to_float32(coefficients: Float64Array) -> Float32Array:
    """Rounds once, into contiguous memory; numbers beyond float32 become its largest."""
    with np.errstate(under="ignore"):
        return np.clip(coefficients, -LARGEST, LARGEST).astype(np.float32, order="C")
