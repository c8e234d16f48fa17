"""2×2 matrices as unevaluated sums of two float64, about 106 bits, with the same bits on every processor.

Error-free transforms (Dekker 1971; Knuth, TAOCP 2, 4.2.2; Ogita, Rump and Oishi 2005) need IEEE float64 additions and
multiplications alone, one NumPy call each, so that no compiler fuses two of them. Long double would be as accurate, but
it is 64 bits of mantissa on x86, 113 on aarch64 and 53 elsewhere.

Matrices are [2, 2, ...] arrays: entries first, so that every operation runs over contiguous numbers.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from weightserver.core.arrays import Float64Array

Pair = tuple[Float64Array, Float64Array]
"""High and low part: their sum is the value, and the high part is that sum rounded."""

_SPLITTER = 134_217_729.0  # 2^27 + 1
_SHORT_BITS = 29
_CHUNK = 4_096
"""Numbers at a time, so that they stay in the cache."""


def pieces(value: Fraction, count: int) -> list[float]:
    """Numbers of at most 29 bits that add up to `value` ≥ 0 within a part in 2^(28·count).

    The product of each with a float32 (24 bits) is exact in float64.
    """
    parts = []
    for _ in range(count):
        exponent = value.numerator.bit_length() - value.denominator.bit_length() - (_SHORT_BITS - 1)
        unit = Fraction(2) ** max(exponent, -1074)
        part = value // unit * unit
        parts.append(float(part))
        value -= part
    return parts


def pair(value: Fraction) -> Pair:
    """`value` as a pair, 0-dimensional."""
    high = float(value)
    return np.array(high), np.array(float(value - Fraction(high)))


def two_sum(a: Float64Array | float, b: Float64Array) -> Pair:
    """a + b, exactly."""
    total: Float64Array = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _split(a: Float64Array) -> Pair:
    """Two halves of 26 bits, whose sum is exact; |a| < 2^996."""
    scaled = a * _SPLITTER
    high = scaled - (scaled - a)
    return high, a - high


def times(a: Pair, b: Pair) -> Pair:
    """a · b within 2^-102 of it; shapes that broadcast."""
    return two_sum(*_product(a, b, _split(a[0]), _split(b[0])))


def plus(a: Pair, b: Pair) -> Pair:
    """a + b within 2^-104 of |a| + |b|."""
    total, error = two_sum(a[0], b[0])
    error += a[1]
    error += b[1]
    return two_sum(total, error)


def _product(a: Pair, b: Pair, a_halves: Pair, b_halves: Pair) -> Pair:
    """a · b, not normalised: the rounded product of the high parts, and the remainder."""
    (a1, a2), (b1, b2) = a_halves, b_halves
    product = a[0] * b[0]
    low = a1 * b1
    low -= product
    low += a1 * b2
    low += a2 * b1
    low += a2 * b2
    low += a[0] * b[1]
    low += a[1] * b[0]
    return product, low


def matmul(later: Pair, earlier: Pair) -> Pair:
    """Products of 2×2 matrices, [2, 2, ...] each; every entry within 2^-100 of |later|·|earlier|."""

    def of_rows(matrices: Pair) -> Pair:  # [i, k, 1, ...]
        return matrices[0][:, :, None], matrices[1][:, :, None]

    def of_columns(matrices: Pair) -> Pair:  # [1, k, j, ...]
        return matrices[0][None], matrices[1][None]

    high, low = _product(
        of_rows(later), of_columns(earlier), of_rows(_split(later[0])), of_columns(_split(earlier[0]))
    )  # [i, k, j, ...]
    total, error = two_sum(high[:, 0], high[:, 1])
    error += low[:, 0]
    error += low[:, 1]
    return two_sum(total, error)


def cosine(angle: Float64Array) -> Float64Array:
    """cos of 0 ≤ angle ≤ π, [n], rounded once but for one in 2^40: the platforms' functions differ in the last bit.

    Taylor's series of an eighth of the angle, then cos 2a = 2·cos² a − 1, three times.
    """
    result = np.empty_like(angle)
    for chunk in (slice(start, start + _CHUNK) for start in range(0, len(angle), _CHUNK)):
        eighth = angle[chunk] / 8, np.zeros(1)
        square, total = times(eighth, eighth), _TAYLOR[-1]
        for coefficient in _TAYLOR[-2::-1]:
            total = plus(times(square, total), coefficient)
        for _ in range(3):
            high, low = times(total, total)
            total = plus((2 * high, 2 * low), (-np.ones(1), np.zeros(1)))
        result[chunk] = total[0]
    return result


_TAYLOR = [pair(Fraction((-1) ** k, math.factorial(2 * k))) for k in range(13)]
