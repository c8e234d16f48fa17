"""Order of visits: pure functions of seeds and the visit index (Section 2.2 of the paper; Algorithm 3).

The N images stand in a fixed random order; a row of the classifier is an image's position in it. A window is W
consecutive positions (modulo N); each window is visited once, in a shuffled order, then the window moves by S. Visit i
of the endless stream lies in window i div W; the stream extends to negative indexes. NumPy only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Int64Array
from weightserver.core.errors import ArgumentError
from weightserver.core.splitmix import derive_seed, splitmix64

_NUM_ROUNDS = 6
_LARGEST_GROUP, _GROUPS_OF_NODE = 1 << 10, 8
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_ORDER, _WINDOWS, _RANGES = 1, 2, 4
"""Purposes of a seed's numbers (`derive_seed`); 3, 5, 6 and 8 are the trainer's, 7 that of `negatives`."""


class RowOrder:
    """The keyed random order of N images: a bijection row <-> image that needs no memory, a function of order_seed.

    A Feistel network permutes the smallest 4^k ≥ N numbers; numbers outside 0..N-1 are permuted again until they are
    inside (cycle walking; Black and Rogaway, CT-RSA 2002).
    """

    def __init__(self, num_rows: int, order_seed: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {num_rows}")
        self.num_rows = num_rows
        self._half_bits = np.uint64(max(1, -(-(num_rows - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        self._round_seeds = [derive_seed(derive_seed(order_seed, _ORDER), number) for number in range(_NUM_ROUNDS)]

    def images(self, rows: Int64Array) -> Int64Array:
        """The image of each row: int64 [n] to int64 [n]."""
        return self._walk(rows, self._round_seeds, swapped=False)

    def rows(self, images: Int64Array) -> Int64Array:
        """The row of each image: the inverse of `images`."""
        return self._walk(images, self._round_seeds[::-1], swapped=True)

    def _walk(self, values: Int64Array, seeds: list[int], *, swapped: bool) -> Int64Array:
        result = self._permute(values.astype(np.uint64), seeds, swapped)
        while (outside := np.flatnonzero(result >= self.num_rows)).size:
            result[outside] = self._permute(result[outside], seeds, swapped)
        return result.astype(np.int64)

    def _permute(self, values: npt.NDArray[np.uint64], seeds: list[int], swapped: bool) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        if swapped:  # the inverse is the same network with halves swapped and rounds reversed
            left, right = right, left
        for seed in seeds:
            left, right = right, left ^ (splitmix64(seed, right) & self._mask)
        if swapped:
            left, right = right, left
        permuted: npt.NDArray[np.uint64] = left << self._half_bits | right
        return permuted


class RangesOrder:
    """The order of images that were added in ranges of ids: each range of rows has its own order.

    Rows first … first+size−1 hold the images of the same ids, in the order whose key is a function of (order_seed,
    first); that of the first range is `RowOrder(size, order_seed)`. So a new range moves no row of earlier ranges.

    Raises:
        ValueError: no range, or an empty one.
    """

    def __init__(self, sizes: Sequence[int], order_seed: int) -> None:
        if not sizes:
            raise ValueError("an order needs at least one range of images")
        self.sizes = tuple(sizes)
        self.num_rows = sum(sizes)
        self.order_seed = order_seed
        self._firsts = np.cumsum([0, *sizes[:-1]])
        seeds = (
            derive_seed(derive_seed(order_seed, _RANGES), int(first)) if first else order_seed for first in self._firsts
        )
        self._orders = [RowOrder(size, seed) for size, seed in zip(sizes, seeds, strict=True)]

    def images(self, rows: Int64Array) -> Int64Array:
        """The image of each row: int64 [n] to int64 [n]."""
        return self._map(rows, RowOrder.images)

    def rows(self, images: Int64Array) -> Int64Array:
        """The row of each image: the inverse of `images`."""
        return self._map(images, RowOrder.rows)

    def _map(self, values: Int64Array, method: Callable[[RowOrder, Int64Array], Int64Array]) -> Int64Array:
        if len(self._orders) == 1:
            return method(self._orders[0], values)
        result = np.empty(len(values), np.int64)
        ranges = np.searchsorted(self._firsts, values, side="right") - 1
        for number in np.unique(ranges):
            chosen, first = ranges == number, self._firsts[number]
            result[chosen] = method(self._orders[number], values[chosen] - first) + first
        return result


class VisitSchedule:
    """The sliding-window stream of visits. Epoch order is window_stride = window_size = num_rows. Thread-safe.

    Raises:
        ArgumentError: unless 1 ≤ window_stride ≤ window_size ≤ num_rows.
    """

    def __init__(self, *, num_rows: int, window_size: int, window_stride: int, seed: int) -> None:
        if not 1 <= window_size <= num_rows:
            raise ArgumentError("window_size", f"must lie in 1..{num_rows}, the number of images, got {window_size}")
        if not 1 <= window_stride <= window_size:
            raise ArgumentError("window_stride", f"must lie in 1..{window_size}, the window size, got {window_stride}")
        self.num_rows = num_rows
        self.window_size = window_size
        self.window_stride = window_stride
        self._seed = derive_seed(seed, _WINDOWS)
        self._windows: OrderedDict[int, Int64Array] = OrderedDict()
        self._most_kept = 8 if window_size <= 1 << 17 else 2  # readers are less than a large window apart
        self._lock = threading.Lock()

    def visits(self, start: int, stop: int) -> Int64Array:
        """Rows visited by visits start … stop−1, which may be negative: int64 [stop − start]."""
        start, stop = int(start), int(stop)  # NumPy integers would overflow below
        parts = []
        while start < stop:
            window, offset = divmod(start, self.window_size)
            with self._lock:
                part = self._window(window)[offset : offset + stop - start]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _window(self, window: int) -> Int64Array:
        """The rows of a window in the order of their visits, int64 [W]."""
        if (rows := self._windows.get(window)) is None:
            if len(self._windows) == self._most_kept:
                self._windows.popitem(last=False)
            first = np.uint64(window * self.window_size % 2**64)
            counter: npt.NDArray[np.uint64] = np.add(first, np.arange(self.window_size, dtype=np.uint64))
            shuffled = np.argsort(splitmix64(self._seed, counter), kind="stable")
            rows = (shuffled + window * self.window_stride % self.num_rows) % self.num_rows
            self._windows[window] = rows
        return rows


def dealt_to_nodes(positions: Int64Array, num_nodes: int, *, window_size: int) -> Int64Array:
    """The order in which visits to positions, int64 [B], are dealt to machines in equal parts: int64 [B].

    Neighbouring images, which are read together, go to one machine whenever they are visited. Groups of neighbours
    stand on a circle in the order of the golden ratio, wherever the window is evenly. The batch is cut there into equal
    parts, so that what one machine has too much of goes to the next one. The visits of a part keep their order.
    """
    group_size = min(_LARGEST_GROUP, max(1, window_size // (_GROUPS_OF_NODE * num_nodes)))
    group, offset = np.divmod(positions.astype(np.uint64), np.uint64(group_size))
    place = group * _GOLDEN_RATIO + offset  # modulo 1, as a fraction of 2^64
    node = np.empty(size := len(positions), np.uint16)  # which NumPy sorts by radix
    node[np.argsort(place, kind="stable")] = (np.arange(1, size + 1) * num_nodes - 1) // size  # shares as of `Ranks`
    return np.argsort(node, kind="stable")
