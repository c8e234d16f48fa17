"""The transfer products of a schedule: stored ones over segments of steps, and from these the one of any gap."""

from __future__ import annotations

import itertools
import math
from copy import copy
from dataclasses import dataclass

import numpy as np

from weightserver.core import kernel
from weightserver.core.arrays import Float32Array, Float64Array, Int64Array
from weightserver.core.double_double import Pair, matmul
from weightserver.core.known_products import LEAF, NOTHING_KNOWN, KnownProducts, RecentProducts, distinct
from weightserver.core.step_matrices import LIMIT, Steps, clip, power_of_two, product_of, to_float32

_CHUNK = 256
"""Number of products computed at a time, so that they stay in the cache."""
_MOST_LEAVES = 8_192
"""Number of leaves whose results are remembered for one stop, 776 bytes each."""
_OVERFLOW = 2.0**128 - 2.0**103
"""The smallest number that rounds to an infinite float32."""
_HARMLESS_LOG = 126
"""log2 of the size of rows that no update makes overflow: its products and sums are at most twice as large."""
LARGEST_SAFE = 2.0**60
"""A float32 holds the sum of squares of many values of this size."""
_SMALLEST = 2.0**-500
_RATES = 8_192
"""Number of learning rates at a time, so that their products stay in the cache."""


@dataclass(frozen=True)
class _Nodes:
    """Products of updates in (w, z), in double-double, divided by powers of two so that none leaves float64's range."""

    high: Float64Array
    low: Float64Array
    """[2, 2, n] each, the largest entry in [1/2, 1)."""
    exponent: Int64Array
    """[n]: log2 of the divisors."""

    @classmethod
    def scaled(cls, product: Pair, exponent: Int64Array | int = 0) -> _Nodes:
        """Scales products [2, 2, n] of any size that are divided by 2^exponent already."""
        high, low = product
        more = power_of_two(high)
        return cls(np.ldexp(high, -more), np.ldexp(low, -more), more + np.int64(exponent))

    @classmethod
    def empty(cls, number: int) -> _Nodes:
        return cls(np.empty((2, 2, number)), np.empty((2, 2, number)), np.empty(number, np.int64))

    def put(self, place: int, nodes: _Nodes) -> None:
        """Stores the nodes from `place` on."""
        some = slice(place, place + len(nodes))
        self.high[..., some], self.low[..., some], self.exponent[some] = nodes.high, nodes.low, nodes.exponent

    def __len__(self) -> int:
        return len(self.exponent)

    def __getitem__(self, some: slice) -> _Nodes:
        return _Nodes(self.high[..., some], self.low[..., some], self.exponent[some])

    def halved(self) -> _Nodes:
        """The products of each two neighbours."""
        earlier, later = self[0::2], self[1::2]
        product = matmul((later.high, later.low), (earlier.high, earlier.low))
        return _Nodes.scaled(product, earlier.exponent + later.exponent)


_IDENTITY = _Nodes(np.eye(2)[..., None], np.zeros((2, 2, 1)), np.zeros(1, np.int64))


def _sizes(horizon: int) -> list[int]:
    """Number of steps in a node of each existing level."""
    return [LEAF << level for level in range((horizon // LEAF).bit_length())]


class TransferTables:
    """One immutable state of a schedule; only the cache of recent results is replaced."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self._steps = Steps(momentum, weight_decay)
        self._tame = True
        self.horizon = 0
        self.safe_size = LARGEST_SAFE
        self._rates = np.zeros(LEAF, np.float32)  # zeros from the horizon to the end of its leaf
        self._firsts: list[int] = []  # the beginning of each level in `_nodes`
        self._nodes = _IDENTITY  # node j of level k: product of the leaves [j·2^k, (j+1)·2^k); at last the identity
        self._growth = np.zeros((3, 1), np.float32)  # of each node, see `_joined`
        self._recent = RecentProducts({}, 0)
        """A fetch of many rows asks for a few hundred distinct (start, stop) thousands of times, chunk by chunk."""

    @property
    def learning_rates(self) -> Float32Array:
        view = self._rates[: self.horizon]
        view.flags.writeable = False
        return view

    @property
    def num_bytes(self) -> int:
        nodes = self._nodes
        return sum(array.nbytes for array in (self._rates, nodes.high, nodes.low, nodes.exponent, self._growth))

    def extended(self, start: int, rates: Float32Array) -> TransferTables:
        """Tables with `rates` from step `start` on; products of other segments are copied."""
        stop = start + len(rates)
        tables = copy(self)
        tables._recent = RecentProducts({}, 0)
        tables.horizon = horizon = max(self.horizon, stop)
        tables._rates = np.zeros((horizon // LEAF + 1) * LEAF, np.float32)
        tables._rates[: self.horizon] = self._rates[: self.horizon]
        tables._rates[start:stop] = rates
        tables._tame = self._tame and self._steps.are_tame(rates)
        counts = [horizon // size for size in _sizes(horizon)]
        first_nodes = [0, *itertools.accumulate(counts)]
        nodes = _Nodes.empty(first_nodes[-1] + 1)
        growth = np.zeros((3, len(nodes)), np.float32)
        tables._firsts, tables._nodes, tables._growth = first_nodes[:-1], nodes, growth
        nodes.put(first_nodes[-1], _IDENTITY)
        for level, size in enumerate(_sizes(horizon)):
            here = first_nodes[level]
            first, last = start // size, min(-(-stop // size), counts[level])
            if level < len(self._firsts):
                old = self._nodes[self._firsts[level] :][: self.horizon // size]
                nodes.put(here, old[:first])
                nodes.put(here + last, old[last:])
                old_growth = self._growth[:, self._firsts[level] :][:, : self.horizon // size]
                growth[:, here : here + first] = old_growth[:, :first]
                growth[:, here + last : here + old_growth.shape[1]] = old_growth[:, last:]
            for i in range(first, last, _CHUNK):
                end = min(i + _CHUNK, last)
                made = slice(here + i, here + end)
                if level:
                    below = slice(first_nodes[level - 1] + 2 * i, first_nodes[level - 1] + 2 * end)
                    nodes.put(made.start, nodes[below].halved())
                    growth[:, made] = _joined(growth[:, below], tables._log_norm(below))
                else:
                    leaves, growth[:, made] = tables._leaves(i, end)
                    nodes.put(made.start, leaves)
        return tables

    def _leaves(self, first: int, last: int) -> tuple[_Nodes, Float64Array]:
        """Products of the whole leaves first … last−1, and their growth, [3, n]."""
        high, low = self._steps.exact(self._rates[first * LEAF : last * LEAF].reshape(-1, LEAF).T)
        norm = self._steps.log_norm(high)
        growth = np.repeat(np.maximum(norm, 0)[None], 3, axis=0)
        while high.shape[2] > 1:
            high, low = matmul((high[:, :, 1::2], low[:, :, 1::2]), (high[:, :, 0::2], low[:, :, 0::2]))
            growth = _joined(growth, norm)
            if self._tame:
                norm = self._steps.log_norm(high)
            else:  # the clipped products understate the growth
                norm = norm[0::2] + norm[1::2]
                low[np.abs(high) > LIMIT] = 0
                clip(high, LIMIT)
        return _Nodes.scaled((high[:, :, 0], low[:, :, 0])), growth[:, 0]

    def _log_norm(self, some: slice) -> Float64Array:
        """log2 of the growth of the norm in some nodes: [n]."""
        return self._steps.log_norm(self._nodes.high[..., some]) + self._nodes.exponent[some]

    def find_safe_size(self, *, single_rate: bool) -> float:
        """`Schedule.safe_size` after a change: 0, or from 1 to 2^60."""
        growth = self._largest_power() if single_rate else self._largest_growth()
        if growth > _HARMLESS_LOG:
            return 0.0
        size = 2.0 ** (_HARMLESS_LOG - 1 - growth) / (self._steps.from_norm * self._steps.to_norm)
        return min(size, LARGEST_SAFE) if size >= 1 else 0.0  # below 1 a coefficient might be beyond float32

    def _largest_growth(self) -> float:
        """log2 of the largest factor by which a row's norm grows between any two steps."""
        largest = until_here = 0.0
        leaf, num_leaves = 0, self.horizon // LEAF
        for level in reversed(range(len(self._firsts))):
            if num_leaves >> level & 1:
                node = self._firsts[level] + (leaf >> level)
                from_first, to_last, anywhere = self._growth[:, node].tolist()
                largest = max(largest, anywhere, until_here + from_first)
                until_here = max(to_last, until_here + float(self._log_norm(slice(node, node + 1))[0]))
                leaf += 1 << level
        _, growth = self._leaves(leaf, leaf + 1)  # after the horizon the rates are 0, and no row grows
        return max(largest, float(growth[2, 0]), until_here + float(growth[0, 0]))

    def _largest_power(self) -> float:
        """The same if any one of the learning rates were that of all steps."""
        rates, largest = np.unique(self.learning_rates), 0.0
        for some in np.split(rates, range(_RATES, len(rates), _RATES)):
            power, growth = self._steps.rounded(some), np.zeros(len(some))
            for _ in range(self.horizon.bit_length()):
                growth += np.maximum(self._steps.log_norm(power), 0)
                power = clip(product_of(power, power), LIMIT)
            largest = max(largest, float(growth.max()))
        return largest

    def overflow(
        self, start: int, stop: int, weight: Float64Array, momentum_buffer: Float64Array
    ) -> tuple[int, int] | None:
        """The first update from `start` to `stop` in which SGD makes one of these rows (float64 [n, D]) infinite or
        NaN, and the row's position; None if there is none."""
        if not len(weight):
            return None
        steps, step = self._steps, start
        rows = steps.in_z(weight, momentum_buffer)
        while step < stop:
            size = max(float(np.abs(rows[0]).max()), steps.unit * float(np.abs(rows[1]).max()), _SMALLEST)
            node = self._largest_node(step, stop, _HARMLESS_LOG - math.log2(steps.from_norm * size))
            if node is not None:
                level, place = node
                product = np.ldexp(self._nodes.high[..., place], self._nodes.exponent[place])
                rows = np.einsum("ij,jnd->ind", product, rows)
                step += LEAF << level
                continue
            weight, momentum_buffer = steps.weight_and_momentum(rows)
            end_of_leaf = min((step // LEAF + 1) * LEAF, stop)
            while step < end_of_leaf:
                decay = steps.weight_decay * weight
                momentum_buffer = steps.momentum * momentum_buffer + decay
                change = float(self._rates[step]) * momentum_buffer
                weight = weight - change
                largest = np.max(np.abs([decay, momentum_buffer, change, weight]), axis=(0, 2))
                if not largest.max() < _OVERFLOW:
                    return step, int((~(largest < _OVERFLOW)).argmax())
                step += 1
            rows = steps.in_z(weight, momentum_buffer)
        return None

    def _largest_node(self, step: int, stop: int, room: float) -> tuple[int, int] | None:
        """Level and place of the longest node from `step` to at most `stop` in which no row grows beyond 2^room times
        its norm; None if there is none."""
        if step % LEAF:
            return None
        leaf = step // LEAF
        for level in reversed(range(len(self._firsts))):
            place = self._firsts[level] + (leaf >> level)
            if leaf % (1 << level) == 0 and step + (LEAF << level) <= stop and self._growth[0, place] <= room:
                return level, place
        return None

    def transfer(self, start: Int64Array, stop: int) -> Float64Array:
        """As `Schedule.transfer`; the products of some thousand leaves are computed once."""
        found = self._remembered(start, stop)
        return self._products(start, stop) if found is None else found[0].products.take(found[1], axis=0)

    def coefficients(self, start: Int64Array, stop: int) -> Float32Array:
        """The same rounded to float32."""
        found = self._remembered(start, stop)
        return (
            to_float32(self._products(start, stop)) if found is None else found[0].coefficients.take(found[1], axis=0)
        )

    def _remembered(self, start: Int64Array, stop: int) -> tuple[KnownProducts, Int64Array] | None:
        """Products to `stop`, and the places of those from `start` (int64 [n]) among them, [n].

        None if these are too many to remember: rows whose gaps differ that much hardly share one.
        """
        known = self._recent.by_stop.get(stop, NOTHING_KNOWN)
        place, missing = known.find(start)
        if missing.any():
            wanted = start[missing]
            assert 0 <= wanted.min() <= wanted.max() <= stop <= self.horizon, "0 ≤ start ≤ stop ≤ horizon"
            leaves = known.leaves_to_add(wanted, stop // LEAF)
            if len(known) + len(leaves) > _MOST_LEAVES:
                return None
            known = known.joined(self._of_leaves(leaves, stop))
            self._recent = self._recent.with_newest(stop, known)
            place, _ = known.find(start)
        return known, place

    def _of_leaves(self, leaves: Int64Array, stop: int) -> KnownProducts:
        """The products from every step of `leaves` (int64 [n], ascending) to `stop`."""
        compiled = kernel.compiled()
        if compiled is None or not self._tame:
            return KnownProducts.of(leaves, self._products_of_leaves(leaves, stop))
        products = np.empty((LEAF * len(leaves), 2, 2))
        coefficients = np.empty(products.shape, np.float32)
        nodes = self._nodes
        schedule = self._rates, np.array(self._firsts, np.int64), nodes.high, nodes.exponent
        compiled.leaf_products(schedule, self._steps.constants, LIMIT, leaves, stop, products, coefficients)
        return KnownProducts(leaves, products, coefficients)

    def _products(self, start: Int64Array, stop: int) -> Float64Array:
        """transfer(start, stop) for each start (int64 [n]): [n, 2, 2]."""
        leaf = start // LEAF
        leaves = distinct(leaf)
        place = leaves.searchsorted(leaf)
        ends, to_stop, exponent = self._parts(leaves, stop)
        product = product_of(to_stop[..., place], ends[:, :, start % LEAF, place])
        return self._in_u(product, exponent[place]).transpose(2, 0, 1)

    def _products_of_leaves(self, leaves: Int64Array, stop: int) -> Float64Array:
        """The same from every step of `leaves` (int64 [n], ascending): [16·n, 2, 2]; identities from stop on.

        The compiled kernel computes the same bits.
        """
        ends, to_stop, exponent = self._parts(leaves, stop)
        return self._in_u(product_of(to_stop[:, :, None], ends), exponent).transpose(3, 2, 0, 1).reshape(-1, 2, 2)

    def _in_u(self, product: Float64Array, exponent: Int64Array) -> Float64Array:
        """Products in (w, z) that are divided by 2^exponent, in (w, u) and as they are."""
        return clip(np.ldexp(self._steps.in_u(product), exponent), np.finfo(np.float64).max)

    def _parts(self, leaves: Int64Array, stop: int) -> tuple[Float64Array, Float64Array, Int64Array]:
        """Products from each step of `leaves` (int64 [n], ascending) to the leaf's end or to stop, [2, 2, 16, n]; those
        from there to stop, [2, 2, n]; and their exponents, [n].

        The latter go over whole leaves, then from the beginning of stop's leaf to stop.
        """
        last_leaf = stop // LEAF
        earlier = leaves if leaves[-1] < last_leaf else leaves[:-1]
        ends = self._to_end_of_leaf(np.append(earlier, last_leaf), stop)
        to_stop, exponent = np.empty((2, 2, len(leaves))), np.zeros(len(leaves), np.int64)
        to_stop[..., len(earlier) :] = np.eye(2)[..., None]  # products in stop's leaf have reached stop already
        if len(earlier):
            between, exponent[: len(earlier)] = self._between(earlier + 1, last_leaf)
            to_stop[..., : len(earlier)] = product_of(ends[:, :, 0, -1:], between)
        return ends[..., : len(leaves)], to_stop, exponent

    def _to_end_of_leaf(self, leaf: Int64Array, stop: int) -> Float64Array:
        """Products from each step of leaves (int64 [n]) to the leaf's end or to stop: [2, 2, 16, n]."""
        step = leaf * LEAF + np.arange(LEAF)[:, None]
        products = self._steps.rounded(self._rates[step])
        products[:, :, step >= stop] = np.eye(2)[..., None]
        distance = 1
        while distance < LEAF:  # each product reaches twice as far
            products[:, :, :-distance] = product_of(products[:, :, distance:], products[:, :, :-distance])
            if not self._tame:
                clip(products, LIMIT)
            distance *= 2
        return products

    def _between(self, leaf: Int64Array, last_leaf: int) -> tuple[Float64Array, Int64Array]:
        """Products of the leaves from each (int64 [n], ≤ last_leaf) to last_leaf − 1, [2, 2, n], and exponents, [n].

        Climbs to ever larger nodes up to the highest bit in which the two differ, then descends. Leaves of one such bit
        share the descent.
        """
        highest = np.maximum(np.frexp((leaf ^ last_leaf).astype(np.float64))[1] - 1, 0)
        ahead = (last_leaf >> highest << highest) - leaf
        tops = distinct(highest.astype(np.int64))
        beyond = last_leaf - (last_leaf >> tops << tops)
        num_levels = max(int(ahead.max()), int(beyond.max()), 1).bit_length()
        level = np.arange(1 << (num_levels - 1).bit_length())[:, None]
        first, identity = np.zeros_like(level), len(self._nodes) - 1
        firsts = self._firsts[:num_levels]  # empty if not even one leaf is complete
        first[: len(firsts), 0] = firsts
        climb = np.where(ahead >> level & 1, first + (leaf + (ahead & (1 << level) - 1) >> level), identity)
        descent = np.where(beyond >> level & 1, first + (last_leaf >> level) - 1, identity)
        chosen = np.concatenate([climb, descent], axis=1)
        products, exponent = self._nodes.high[:, :, chosen], self._nodes.exponent[chosen]
        # Pairs of levels, then pairs of those: the result depends on the levels alone, not on their number. The climb
        # is in the order of the levels; the descent in the opposite order, hence transposed.
        products[..., len(leaf) :] = products[..., len(leaf) :].swapaxes(0, 1).copy()
        while products.shape[2] > 1:
            products = product_of(products[:, :, 1::2], products[:, :, 0::2])
            more = power_of_two(products)
            products, exponent = np.ldexp(products, -more), exponent[1::2] + exponent[0::2] + more
        climbed, descended = products[:, :, 0, : len(leaf)], products[:, :, 0, len(leaf) :].swapaxes(0, 1)
        top = tops.searchsorted(highest)
        return product_of(descended[..., top], climbed), exponent[0, : len(leaf)] + exponent[0, len(leaf) + top]


def _joined(growth: Float64Array | Float32Array, norm: Float64Array) -> Float64Array:
    """Growth over each two neighbouring segments: [3, 2n, ...] and their log_norm [2n, ...] to [3, n, ...].

    Growth is log2 of the largest factor by which a row's norm grows, at least 0: from the first step to any, from any
    to the last, and between any two.
    """
    (from_first, to_last, anywhere), (first, to_end, within) = growth[:, 0::2], growth[:, 1::2]
    return np.stack(
        [
            np.maximum(from_first, norm[0::2] + first),
            np.maximum(to_end, to_last + norm[1::2]),
            np.maximum(np.maximum(anywhere, within), to_last + first),
        ]
    )
