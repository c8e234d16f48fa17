"""Initial rows as a pure function of (seed, row), the same bits on every processor and with every NumPy version.

Random bits come from SplitMix64. Each 32-bit half of an output gives one normal: two quantiles of N(0, 1) are looked up
with 16 bits each and their sum is scaled, so only exactly rounded operations touch the result.
"""

from __future__ import annotations

import functools
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import xxhash

from weightserver.core.precision import WEIGHT, precision_of
from weightserver.core.spec import TableSpec
from weightserver.core.splitmix import splitmix64

_QUANTILES_XXH3 = 0x9DB855DD62EEDC28
_CHUNK_WORDS = 1 << 13
"""Words per chunk, so that the work stays in the cache."""


@functools.cache
def quantiles() -> npt.NDArray[np.float32]:
    """float32 [65536]: the quantiles (i + ½)/65536 of N(0, 1/2), so that the sum of two has variance 1."""
    normal = NormalDist(0.0, 0.5**0.5)
    upper = [normal.inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)]
    table = np.array([-q for q in reversed(upper)] + upper, dtype=np.float32)
    digest = xxhash.xxh3_64_intdigest(table.tobytes())
    assert digest == _QUANTILES_XXH3, f"this machine's logarithm gives other quantiles ({digest:#x})"
    return table


def initial_rows(spec: TableSpec, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Initial weights of `rows` (int64 [n], any order): float32 [n, dim], N(0, init_std²), rounded to `dtype`."""
    weight = np.empty((len(rows), spec.dim), dtype=np.float32)
    words_per_row = -(-spec.dim // 2)
    std = np.float32(spec.init_std)
    columns = np.arange(words_per_row, dtype=np.uint64)
    chunk = max(1, _CHUNK_WORDS // words_per_row)
    for start in range(0, len(rows), chunk):
        first_word = rows[start : start + chunk].astype(np.uint64) * np.uint64(words_per_row)
        halves = splitmix64(spec.seed, first_word[:, None] + columns).astype("<u8", copy=False).view("<u2")
        found = quantiles().take(halves, mode="wrap")  # every index is valid; "raise" looks for one that is not
        normals = weight[start : start + chunk]
        np.add(found[:, 0 : 2 * spec.dim : 2], found[:, 1 : 2 * spec.dim : 2], out=normals)
        normals *= std
    return precision_of(spec).as_if_stored(weight, rows, 0, WEIGHT)
