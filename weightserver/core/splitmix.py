"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), whose n-th output can be computed alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(seed: int, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Output number `index` of the SplitMix64 stream that starts at a mixed `seed`; any shape, uint64 in and out."""
    z = index * _GAMMA  # wraps modulo 2^64, as the generator does
    z += np.uint64(mix_seed(seed))
    z ^= z >> np.uint64(30)
    z *= _MIX_1
    z ^= z >> np.uint64(27)
    z *= _MIX_2
    z ^= z >> np.uint64(31)
    return z


def derive_seed(seed: int, purpose: int) -> int:
    """A seed of its own for each purpose, so that no two uses share a number."""
    return int(splitmix64(seed % 2**64, np.array([purpose], np.uint64))[0])


def mix_seed(seed: int) -> int:
    """Spreads nearby seeds over the whole state of 64 bits, so that their streams do not overlap."""
    mask = 2**64 - 1
    z = (seed + int(_GAMMA)) & mask
    z = ((z ^ (z >> 30)) * int(_MIX_1)) & mask
    z = ((z ^ (z >> 27)) * int(_MIX_2)) & mask
    return z ^ (z >> 31)
