"""Stored values: float32 as it is, or bfloat16, the upper half of a float32, rounded stochastically.

A table computes in float32 and stores, and sends, the numbers of its `dtype`. bfloat16 has 8 bits of mantissa: rounded
to the nearest one, every update below 2^-9 of a weight would be lost, which most updates and all weight decay are. A
value is therefore rounded up or down at random, so that its expectation is the value itself. The random bits are a
function of (seed, row, number of updates that the row has seen, array, column), from SplitMix64: a repeated write, a
replay after a crash, any number of shards, and client and shard round alike. A value that bfloat16 holds is never
changed, so raw state may be read and written back any number of times.

Only integer operations round, so the result is the same on every processor. Subnormal numbers are rounded like all
others. A finite value never becomes infinite: beyond the largest bfloat16 (3.39e38) it becomes that. NaN and infinite
values are refused before they get here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weightserver.core.arrays import BFloat16Array, Float32Array, Int64Array, StoredArray, all_finite
from weightserver.core.spec import TableSpec
from weightserver.core.splitmix import mix_seed, splitmix64

WEIGHT, MOMENTUM_BUFFER, GRADIENT = range(3)
"""Which array of a row is rounded: each has random bits of its own."""

_LARGEST = np.uint32(0x7F7F0000).view(np.float32)
_INFINITE = 0x7F80
_SIGN = 0x8000
_PURPOSE = 0x8F1BBCDCBFA53E0B
"""Separates the random bits of rounding from those of initial weights."""
_CHUNK_VALUES = 1 << 16
"""Values per chunk, so that the work stays in the cache."""


class Precision:
    """How a table's values are stored: as they are, or see `BFloat16`."""

    dtype: np.dtype[Any] = np.dtype("<f4")
    """Type of the stored arrays, little-endian."""
    mixed_seed = 0
    """What the compiled kernel draws the random bits of rounding from."""

    def widened(self, stored: StoredArray) -> Float32Array:
        """The values as float32; float32 ones are not copied."""
        values: Float32Array = stored  # type: ignore[assignment]
        return values

    def rounded(self, values: Float32Array, rows: Int64Array, steps: Int64Array | int, array: int) -> StoredArray:
        """Finite values, float32 [n, D], as they are stored; float32 ones are not copied.

        Args:
            rows: whose they are, int64 [n].
            steps: number of updates that the rows have seen, int64 [n] or one for all.
            array: WEIGHT, MOMENTUM_BUFFER or GRADIENT.
        """
        return values

    def as_if_stored(self, values: Float32Array, rows: Int64Array, steps: Int64Array | int, array: int) -> Float32Array:
        """The values as they come back after they were stored; see `rounded`."""
        return self.widened(self.rounded(values, rows, steps, array))

    def all_finite(self, stored: StoredArray) -> bool:
        """Whether no value is NaN or infinite."""
        return all_finite(self.widened(stored))


class BFloat16(Precision):
    """Values rounded stochastically, by random bits that `seed` determines."""

    dtype = np.dtype("<u2")

    def __init__(self, seed: int) -> None:
        self._seed = seed ^ _PURPOSE
        self.mixed_seed = mix_seed(self._seed)

    def widened(self, stored: StoredArray) -> Float32Array:
        bits = stored.astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)

    def rounded(self, values: Float32Array, rows: Int64Array, steps: Int64Array | int, array: int) -> BFloat16Array:
        dim = values.shape[1]
        num_words = -(-dim // 4)  # each has the random bits of four values
        words = np.arange(array * num_words, (array + 1) * num_words, dtype=np.uint64)
        streams = splitmix64(self._seed, rows.astype(np.uint64))
        streams = splitmix64(self._seed, streams + np.asarray(steps, np.int64).astype(np.uint64))
        stored = np.empty(values.shape, self.dtype)
        rows_per_chunk = max(1, _CHUNK_VALUES // dim)
        for start in range(0, len(values), rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            random = splitmix64(self._seed, streams[chunk, None] + words).astype("<u8", copy=False).view("<u2")
            bits = np.clip(values[chunk], -_LARGEST, _LARGEST).view(np.uint32)
            bits += random[:, :dim]
            bits >>= np.uint32(16)
            stored[chunk] = bits
        return stored

    def all_finite(self, stored: StoredArray) -> bool:
        """Whether no value is infinite or NaN, by the largest bits of all and of the positive values."""
        largest = int(stored.max(initial=0))
        return largest < (_SIGN | _INFINITE) and int(stored.view("<i2").max(initial=0)) < _INFINITE


def precision_of(spec: TableSpec) -> Precision:
    return BFloat16(spec.seed) if spec.dtype == "bfloat16" else Precision()
