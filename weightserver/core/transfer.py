"""The products of a schedule's updates, from any step to any later one: a segment tree in float64.

A node of level k is the product of 16^k updates; 16 nodes have one parent. The tree keeps, for each node whose parent
is complete, the product of the updates from the node's first to its parent's last. A product from step s to step t then
takes one of these on each level from s up to the node that s and t have in common, one product of that node's
children, and those from there down to t. Which they are depends on (s, t) alone.

The bits are the same on every processor, and with one row or many: IEEE float64 additions and multiplications make
them, each rounded by itself, by NumPy or by Python (no BLAS, no fused multiply-add).

A product of t updates errs by at most (t + 8)·2^-52 of its largest entry, 4e-11 after 200,000 updates: a rounding is
2^-53, and with a constant learning rate all updates round alike. That holds for η·λ up to a tenth of the limit of
stability, a thousand times what training uses; beyond, it may be as much as float32's 6e-8. Where η exceeds 1, a
momentum buffer counts in the unit in which it moves as far as a weight, √(η·(1 + m)/λ).
"""

from __future__ import annotations

import threading
from itertools import accumulate
from typing import Any

import numpy as np

from weightserver.core.arrays import Float32Array, Float64Array, Int64Array

_BITS = 4
_CHILDREN = 1 << _BITS
_FEW = 12
"""Up to this many products are computed one by one: NumPy's calls would take longer."""
_MOST_GAPS = 1 << 16
"""Longer gaps are not remembered."""
_MOST_STOPS = 4
_IDENTITY = (1.0, 0.0, 0.0, 1.0)
Matrix = tuple[Any, Any, Any, Any]
"""Four numbers, or arrays of them: [[a, b], [c, d]]."""


def times(later: Any, earlier: Any) -> Matrix:
    """The product later · earlier of 2 × 2 matrices, or of many, as four entries each."""
    a, b, c, d = later
    e, f, g, h = earlier
    return a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h


class _Known:
    """What is remembered of products to one step.

    Args:
        down: for each level, the products from the children of the step's node, up to the one that it lies in.
    """

    def __init__(self, down: list[list[Matrix]]) -> None:
        self.down = down
        self.coefficients = np.zeros((0, 4), np.float32)  # by the length of the gap; NaN where not known
        self.lock = threading.Lock()  # of the coefficients


class TransferTree:
    """Grows at its end; what was asked for once never changes, so any number of threads may read meanwhile."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self._momentum, self._weight_decay = momentum, weight_decay
        self._length = 0
        self._rates = np.zeros(0, np.float32)  # with room for more, as the levels
        self._levels: list[Float64Array] = []  # [4, n] each
        self._known: dict[int, _Known] = {}
        self._growing = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._rates.nbytes + sum(level.nbytes for level in self._levels)

    def rates(self, num_steps: int) -> Float32Array:
        """The learning rates of the first steps, read-only."""
        view = self._rates[:num_steps]
        view.flags.writeable = False
        return view

    def with_rates(self, start: int, rates: Float32Array) -> TransferTree:
        """A tree of the learning rates up to step `start`, and of these (float32 [n]) from there on: this one, longer
        if need be, unless it has others there."""
        with self._growing:
            known = self._rates[start : self._length][: len(rates)]
            if np.array_equal(known, rates[: len(known)]):
                self._append(rates[len(known) :])
                return self
        tree = TransferTree(self._momentum, self._weight_decay)
        tree._length, tree._rates = start, self._rates[:start].copy()
        tree._levels = [level[:, : _complete(start, k)].copy() for k, level in enumerate(self._levels)]
        tree._append(rates)
        return tree

    def _append(self, rates: Float32Array) -> None:
        start, stop = self._length, self._length + len(rates)
        self._rates = _with_room(self._rates, start, stop)
        self._rates[start:stop] = rates
        level = 0
        with np.errstate(over="ignore", invalid="ignore"):
            while (first := _complete(start, level)) < (last := _complete(stop, level)):
                nodes = self._nodes(level, first, last).reshape(4, -1, _CHILDREN).transpose(2, 0, 1).copy()
                for child in reversed(range(_CHILDREN - 1)):
                    nodes[child] = times(nodes[child + 1], nodes[child])
                if level == len(self._levels):
                    self._levels.append(np.empty((4, 0)))
                self._levels[level] = _with_room(self._levels[level], first, last)
                self._levels[level][:, first:last] = nodes.transpose(1, 2, 0).reshape(4, -1)
                level += 1
        self._length = stop

    def _nodes(self, level: int, first: int, last: int) -> Float64Array:
        """Nodes of a level: [4, n]."""
        if level:
            return self._levels[level - 1][:, first << _BITS : last << _BITS : _CHILDREN]
        nodes, rates = np.empty((4, last - first)), self._rates[first:last].astype(np.float64)
        nodes[0], nodes[1] = 1 - rates * self._weight_decay, rates * -self._momentum
        nodes[2], nodes[3] = self._weight_decay, self._momentum
        return nodes

    def products(self, start: Int64Array, stop: int) -> Float64Array:
        """M_{stop−1} ··· M_start for each start (int64 [n], any order, repeats, up to stop): [n, 4]."""
        distinct, place = np.unique(start, return_inverse=True)
        return self._of_distinct(distinct, stop).take(place, axis=0)

    def _of_distinct(self, start: Int64Array, stop: int) -> Float64Array:
        """Products for distinct starts, ascending."""
        if len(start) <= _FEW:
            return self._one_by_one(start, stop)
        place, end = start, len(start)
        products, made = np.empty((4, end)), np.empty((4, end))
        with np.errstate(over="ignore", invalid="ignore"):
            for level, last in enumerate(self._to(stop).down):
                first = _complete(stop, level)  # the first child of the stop's node
                begin = int(place.searchsorted(first))
                there: Float64Array = np.array(last).T.take(place[begin:] - first, axis=1)
                products[:, begin:end] = times(there, made[:, begin:]) if level else there
                if not begin:
                    break
                up = self._levels[level].take(place[:begin], axis=1)
                made = np.array(times(up, made[:, :begin])) if level else up
                place, end = (place[:begin] >> _BITS) + 1, begin
        return products.T

    def _one_by_one(self, start: Int64Array, stop: int) -> Float64Array:
        """Products for starts in any order, which need not be distinct; fast for a few."""
        products, down = list[Matrix](), self._to(stop).down
        for place in start.tolist():
            level, made = 0, _IDENTITY
            while place < (first := _complete(stop, level)):
                up = self._levels[level][:, place].tolist()
                made = times(up, made) if level else up
                place, level = (place >> _BITS) + 1, level + 1
            there = down[level][place - first]
            products.append(times(there, made) if level else there)
        return np.array(products).reshape(-1, 4)

    def coefficients(self, start: Int64Array, stop: int) -> Float32Array:
        """Products rounded to float32: [n, 4], contiguous."""
        edges = np.flatnonzero(start[1:] != start[:-1]) + 1
        if len(start) > 0 and len(edges) < _FEW:  # rows that are neighbours mostly start together
            products = self._one_by_one(start[[0, *edges]], stop)
            return _rounded(products).repeat(np.diff(edges, prepend=0, append=len(start)), axis=0)
        gap = stop - start
        longest = int(gap.max(initial=0))
        if longest >= _MOST_GAPS:
            return _rounded(self.products(start, stop))
        known = self._to(stop)
        with known.lock:
            if longest >= len(known.coefficients):
                more = np.full(((1 << longest.bit_length()) - len(known.coefficients), 4), np.nan, np.float32)
                known.coefficients = np.concatenate([known.coefficients, more])
            found = known.coefficients.take(gap, axis=0)
            missing = np.sort(start[np.isnan(found[:, 0])])
            if len(missing):
                missing = missing[np.diff(missing, prepend=-1) > 0]  # in half the time of numpy.unique
                known.coefficients[stop - missing] = _rounded(self._of_distinct(missing, stop))
                found = known.coefficients.take(gap, axis=0)
        return found

    def _to(self, stop: int) -> _Known:
        known = self._known.get(stop)
        if known is None:
            product, down, level = _IDENTITY, list[list[Matrix]](), 0
            while (place := stop >> _BITS * level) or not level:
                nodes = self._nodes(level, _complete(stop, level), place).T[::-1].tolist()
                down.append([*accumulate(nodes, times, initial=product)][::-1])
                product, level = down[-1][0], level + 1
            known = _Known(down)
            self._known = dict([*self._known.items()][1 - _MOST_STOPS :]) | {stop: known}
        return known


def _complete(num_steps: int, level: int) -> int:
    """The number of nodes of a level whose parents end by then."""
    return num_steps >> _BITS * (level + 1) << _BITS


def _rounded(products: Float64Array) -> Float32Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return products.astype(np.float32, order="C")


def _with_room(array: Any, used: int, needed: int) -> Any:
    """The array, or one with room for `needed` along its last axis, where the first `used` are the same."""
    if needed <= array.shape[-1]:
        return array
    larger = np.empty((*array.shape[:-1], max(needed, 2 * array.shape[-1])), array.dtype)
    larger[..., :used] = array[..., :used]
    return larger
