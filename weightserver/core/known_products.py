"""Transfer products to one step that were computed before, from every step of some leaves."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Float32Array, Float64Array, Int64Array
from weightserver.core.step_matrices import to_float32

Number = TypeVar("Number", np.float32, np.float64)
LEAF = 16
"""Number of steps in the smallest stored product. Bounds the tables' size."""
_PAGE = 64
"""Number of adjacent leaves that are computed together once several calls ask for products to one step."""
_DENSE = 4
"""Pages are computed whole if that is at most so many times the work of the leaves that are needed now."""
_RECENT_BYTES = 7 << 20
"""Memory of the results that are remembered."""
_OVERHEAD_BYTES = 7 << 10
"""Bytes that each remembered stop counts for in addition, which limits stops to about a thousand."""
_TRUE = np.ones(1, bool)


class KnownProducts:
    """Never changes, so that any number of threads may read it.

    Args:
        leaves: [n], ascending; leaf j holds the steps 16·j … 16·j + 15.
        products: float64 [16·n, 2, 2], from each of these steps; the identity for steps from the last one on.
        coefficients: the same rounded to float32.
    """

    def __init__(self, leaves: Int64Array, products: Float64Array, coefficients: Float32Array) -> None:
        self.leaves, self.products, self.coefficients = leaves, products, coefficients
        first, last = (int(leaves[0]), int(leaves[-1])) if len(leaves) else (0, -1)
        self._first = first - 1
        self._slots = np.full(last - first + 3, -1, np.int32)  # of each leaf; -1 for the one before and after these too
        self._slots[leaves - self._first] = np.arange(len(leaves), dtype=np.int32)
        self.num_bytes = sum(array.nbytes for array in (leaves, products, coefficients, self._slots))

    @classmethod
    def of(cls, leaves: Int64Array, products: Float64Array) -> KnownProducts:
        return cls(leaves, products, to_float32(products))

    def __len__(self) -> int:
        return len(self.leaves)

    def find(self, start: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Where the products from `start` (int64 [n]) are, and which of them are missing: [n] each."""
        place = self._slots.take(start // LEAF - self._first, mode="clip").astype(np.int64)
        missing = place < 0
        place *= LEAF
        place += start % LEAF
        return place, missing

    def leaves_to_add(self, start: Int64Array, last_leaf: int) -> Int64Array:
        """The leaves to compute for `start` (int64 [n]), none of them known: ascending.

        The first call for a step may be the only one; the later calls are those of one long fetch, chunk by chunk, and
        ask for most steps of a range sooner or later.
        """
        leaves = distinct(start // LEAF)
        if len(self):
            pages = distinct(leaves // _PAGE)
            if _PAGE * len(pages) <= max(_PAGE, _DENSE * len(leaves)):
                leaves = (pages[:, None] * _PAGE + np.arange(_PAGE)).reshape(-1)
                leaves = leaves[leaves <= last_leaf]
                leaves = leaves[self.find(leaves * LEAF)[1]]
        return leaves

    def joined(self, other: KnownProducts) -> KnownProducts:
        """Both, which have no leaf in common."""
        if not len(self):
            return other
        leaves = np.concatenate([self.leaves, other.leaves])
        order = np.argsort(leaves)

        def ordered(mine: npt.NDArray[Number], others: npt.NDArray[Number]) -> npt.NDArray[Number]:
            both = np.concatenate([mine.reshape(-1, LEAF, 2, 2), others.reshape(-1, LEAF, 2, 2)])
            return both.take(order, axis=0).reshape(-1, 2, 2)

        return KnownProducts(
            leaves[order], ordered(self.products, other.products), ordered(self.coefficients, other.coefficients)
        )


NOTHING_KNOWN = KnownProducts.of(np.zeros(0, np.int64), np.zeros((0, 2, 2)))


class RecentProducts(NamedTuple):
    """Products to the steps that were asked for last. Never changes either."""

    by_stop: dict[int, KnownProducts]
    """The newest is the last."""
    num_bytes: int

    def with_newest(self, stop: int, known: KnownProducts) -> RecentProducts:
        """These and `known`, or as many of them as there is room for."""
        by_stop, num_bytes = self.by_stop.copy(), self.num_bytes
        if (before := by_stop.pop(stop, None)) is not None:
            num_bytes -= before.num_bytes + _OVERHEAD_BYTES
        by_stop[stop] = known
        num_bytes += known.num_bytes + _OVERHEAD_BYTES
        while num_bytes > _RECENT_BYTES:
            num_bytes -= by_stop.pop(next(iter(by_stop))).num_bytes + _OVERHEAD_BYTES
        return RecentProducts(by_stop, num_bytes)


def distinct(values: Int64Array) -> Int64Array:
    """The values (int64 [n]) without repeats, ascending; faster than NumPy's for a few thousand."""
    ordered = np.sort(values)
    if len(ordered) > 1:
        ordered = ordered[np.concatenate([_TRUE, ordered[1:] != ordered[:-1]])]
    return ordered
