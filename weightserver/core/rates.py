"""Learning rates of the first steps, of which two places compare any number by a digest."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from weightserver.core.arrays import Float32Array

_EVERY = 1 << 14
"""Number of learning rates after which the state of the hash is kept: a digest hashes fewer than that."""


class HashedRates:
    """The learning rates of the first steps, float32 [n], and XXH3-64 digests of their beginnings. Immutable.

    Args:
        values: never change, and hold no −0.
        before: those of a beginning of `values`, whose work need not be done again.
    """

    def __init__(self, values: Float32Array, before: HashedRates | None = None) -> None:
        self.values = values
        self._hashes: list[Any] = before._hashes[:] if before else [xxhash.xxh3_64()]
        """States of the hash after the first 0, 1, 2, … times `_EVERY` learning rates."""
        while len(self._hashes) * _EVERY <= len(values):
            self._hashes.append(self._hash(len(self._hashes) * _EVERY))

    def __len__(self) -> int:
        return len(self.values)

    def digest(self, num_steps: int) -> int:
        """The digest of the first `num_steps` (≤ n) learning rates; 0 if and only if that is 0."""
        return (self._hash(num_steps).intdigest() or 1) if num_steps else 0

    def begins_with(self, other: HashedRates, num_steps: int) -> bool:
        """Whether the first `num_steps` (≤ n of both) are the same in both."""
        return self is other or self.digest(num_steps) == other.digest(num_steps)

    def _hash(self, num_steps: int) -> Any:
        kept = min(num_steps // _EVERY, len(self._hashes) - 1)
        hasher = self._hashes[kept].copy()
        hasher.update(np.ascontiguousarray(self.values[kept * _EVERY : num_steps], "<f4").data)
        return hasher


NO_RATES = HashedRates(np.zeros(0, np.float32))


def first_difference(rates: Float32Array, others: Float32Array) -> int | None:
    """The first step at which two schedules that begin at the same step differ; None if none does in both."""
    common = min(len(rates), len(others))
    differ = np.flatnonzero(rates[:common] != others[:common])
    return int(differ[0]) if len(differ) else None
