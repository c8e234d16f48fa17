"""How a row moves: SGD's transfer products over a schedule, and the effect of a fetch and of a gradient on raw rows.

A row's state (w, u), weight and momentum buffer, follows torch.optim.SGD with momentum m, weight decay λ and learning
rate η_t in update t. It is linear: without a gradient, update t is

    M_t = [[1 − η_t·λ, −η_t·m], [λ, m]]        transfer(s, t) = M_{t−1} ··· M_s

and a gradient g adds the impulse (−η_t·g, g). So an untouched row is brought up to date by one product of 2×2 matrices,
and the gradients of a row may arrive in any order. The paper's correction takes one learning rate for all steps of a
gap instead, `single_rate_products`; it serves comparisons.

A row that SGD would make infinite or NaN, at any update of its gap, is an error. Coefficients do not show it: a row may
overflow within the gap and be small again at its end, and if coefficients exceed float32 a row of zeros stays zero. So
a schedule knows up to which size rows are safe whatever the gap (`Schedule.safe_size`), and larger rows are followed
through theirs (`Schedule.require_finite`).

NumPy only, no I/O.
"""

from __future__ import annotations

import itertools
import math
from copy import copy
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Float32Array, Float64Array, Int64Array
from weightserver.core.double_double import Pair, matmul, pair, pieces, times, two_sum
from weightserver.core.errors import StepError
from weightserver.core.spec import TableSpec

_LEAF = 16
"""Number of steps in the smallest stored product; shorter ones are computed when needed. Bounds the tables' size."""
_CHUNK = 256
"""Number of products computed at a time, so that they stay in the cache."""
_RECENT_PRODUCTS = 131_072
"""Number of results that are remembered, 56 bytes each."""
_RECENT_OVERHEAD = 128
"""Results that each remembered stop counts for in addition, which limits stops to about a thousand."""
_LIMIT = 2.0**480
"""A product of two numbers up to this is far from infinite: diverging schedules saturate and never yield inf or NaN."""
_LARGEST_KAPPA = Fraction(2**240)
_TAME = 2.0**30
"""If no entry of a step is beyond this, products of 16 steps stay below the limit."""
_LARGEST = float(np.finfo(np.float32).max)
_OVERFLOW = 2.0**128 - 2.0**103
"""The smallest number that rounds to an infinite float32."""
_HARMLESS_LOG = 126
"""log2 of the size of rows that no update makes overflow: its products and sums are at most twice as large."""
_LARGEST_SAFE = 2.0**60
"""A float32 holds the sum of squares of many values of this size."""
_LARGEST_UNIT = 2.0**16
_SMALLEST = 2.0**-500
_SQUARES = 8_192
"""Number of values whose squares are summed at a time; from 10,000 on BLAS uses further threads."""
MAX_STEPS = 1 << 25
"""Most learning rates of a schedule: a month of 12 steps a second. A shard keeps all of them in memory."""


class Schedule:
    """Learning rates of a run and the transfer products of its rows.

    Products over aligned segments of 16·2^k steps are kept, about 15 bytes a step with the learning rates (inverting
    prefix products instead would lose everything: det M = m). Which segments make up a product depends on (start,
    stop) alone, so neither other rows of a call nor the way in which the schedule grew can change a bit.

    The bits are the same on every processor: IEEE float64 additions and multiplications make them, each a NumPy call of
    its own (no long double, no BLAS, no fused multiply-add).

    Two things keep max|error| / max|product| below 1e-12 over 50,000 steps (see tests/weightserver/test_correction.py):

    - Products are formed in double-double numbers (`double_double`). With a constant learning rate, every step makes
      the same rounding error, and in float64 these add up to more. Also 1 − η·κ, which may nearly vanish, is known to
      1e-31.
    - They are formed in the coordinates (w, z), z = u + κ·w with κ = λ/(1+m). With cos θ = 1 − η·κ, update t is then

          [[cos θ, −η·m], [κ·(1 + cos θ), m·cos θ]]

      up to scaling a rotation by θ between two halves of a damping, diag(1, √m): never longer than 1, however close
      to instability, η·λ → 2(1+m). M_t itself is badly conditioned there, and products of products lose 3 digits more.

    Threads: any number may read while one extends; `extend` replaces one reference to tables that never change.

    Args:
        single_rate: whether a gap is corrected as in the paper, with one learning rate for all its steps; see
            `coefficients`. `transfer` stays the exact product.
    """

    def __init__(
        self,
        *,
        momentum: float,
        weight_decay: float,
        learning_rates: npt.ArrayLike = (),
        single_rate: bool = False,
    ) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.single_rate = single_rate
        self._tables = _Tables(momentum, weight_decay)
        self.extend(0, learning_rates)

    @classmethod
    def of_table(cls, spec: TableSpec, learning_rates: npt.ArrayLike = ()) -> Schedule:
        """The schedule that corrects a table's rows."""
        return cls(
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            learning_rates=learning_rates,
            single_rate=spec.correction == "paper",
        )

    @property
    def horizon(self) -> int:
        """Number of learning rates known."""
        return self._tables.horizon

    @property
    def learning_rates(self) -> Float32Array:
        """The learning rates of all known steps: float32 [horizon], read-only."""
        return self._tables.learning_rates

    @property
    def table_bytes(self) -> int:
        """Bytes of memory that the learning rates and the products take."""
        return self._tables.num_bytes

    @property
    def safe_size(self) -> float:
        """The |value| up to which no row can become infinite or NaN, from any step to any other; 0 if none is safe."""
        return self._tables.safe_size

    def extend(self, start_step: int, learning_rates: npt.ArrayLike) -> None:
        """Sets the learning rates (float32 [n]) of steps start_step … start_step+n−1; later ones stay known.

        Raises:
            ValueError: a gap before start_step, not one-dimensional, or a learning rate < 0, NaN or infinite.
        """
        with np.errstate(over="ignore"):
            rates = np.asarray(learning_rates, dtype=np.float32)
        if not 0 <= start_step <= self.horizon:
            raise ValueError(f"start_step must lie in 0..{self.horizon}, where the schedule ends, got {start_step}")
        if rates.ndim != 1:
            raise ValueError(f"learning_rates must have shape [n], got {list(rates.shape)}")
        bad = ~((rates >= 0) & (rates < np.inf))
        if bad.any():
            first = int(bad.argmax())
            raise ValueError(f"learning rates must be finite and ≥ 0, got {rates[first]} for step {start_step + first}")
        if len(rates):
            with np.errstate(over="ignore", under="ignore", divide="ignore"):
                tables = self._tables.extended(start_step, rates)
                tables.safe_size = tables.find_safe_size(single_rate=self.single_rate)
            self._tables = tables

    def transfer(self, start: Int64Array, stop: int) -> Float64Array:
        """M_{stop−1} ··· M_start for each start (int64 [n], any order, repeats): float64 [n, 2, 2].

        0 ≤ start ≤ stop ≤ horizon. Beyond float64's range a product is 0 or its largest number, silently.
        """
        with np.errstate(over="ignore", under="ignore"):
            return self._tables.transfer(start, stop)[0]

    def products(self, last_step: Int64Array, stop: int) -> Float64Array:
        """The products that move rows of last_step (int64 [n]) to `stop`, before rounding: float64 [n, 2, 2]."""
        if self.single_rate:
            return single_rate_products(self.momentum, self.weight_decay, self._single_rate(stop), stop - last_step)
        return self.transfer(last_step, stop)

    def coefficients(self, last_step: Int64Array, stop: int) -> Float32Array:
        """The coefficients by which `correct` brings rows of last_step (int64 [n]) to `stop`: float32 [n, 2, 2].

        The single definition of that arithmetic: transfer products, rounded once. With `single_rate` they are powers of
        M(η), where η is the learning rate of the last finished update, stop − 1: the newest of the gap, so that a gap
        of one step, or of equal learning rates, is corrected exactly, and it is known for every step that may be
        fetched.
        """
        if self.single_rate:
            return _to_float32(self.products(last_step, stop))
        with np.errstate(over="ignore", under="ignore"):
            return self._tables.transfer(last_step, stop)[1]

    def _single_rate(self, stop: int) -> float:
        return float(self.learning_rates[stop - 1]) if stop else 0.0

    def require_finite(
        self,
        last_step: Int64Array,
        stop: int,
        weight: Float64Array,
        momentum_buffer: Float64Array,
        *,
        rows: Int64Array | None = None,
    ) -> None:
        """Follows raw rows (float64 [n, D] each) from last_step (int64 [n]) to `stop`; `rows` names them in messages.

        Segments in which no row can overflow take one product, the others go update by update.

        Raises:
            StepError: SGD would make a row infinite or NaN in an update before `stop`.
        """
        tables, first_step = self._tables, np.zeros_like(last_step)
        if self.single_rate:  # the same rate throughout, from the row's last step on
            first_step = last_step
            rates = np.full(stop - last_step.min(initial=stop), self._single_rate(stop), np.float32)
            with np.errstate(over="ignore", under="ignore", divide="ignore"):
                tables = _Tables(self.momentum, self.weight_decay).extended(0, rates)
        for seen in np.unique(last_step):
            some = np.flatnonzero(last_step == seen)
            first = int(first_step[some[0]])
            with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
                found = tables.overflow(int(seen) - first, stop - first, weight[some], momentum_buffer[some])
            if found is not None:
                step, row = first + found[0], some[found[1]]
                raise _not_finite(row if rows is None else rows[row], step)


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
        more = _power_of_two(high)
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
    return [_LEAF << level for level in range((horizon // _LEAF).bit_length())]


class _Steps:
    """Single updates as matrices in (w, z), for any learning rates of one momentum and weight decay."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        kappa = min(Fraction(weight_decay) / (1 + Fraction(momentum)), _LARGEST_KAPPA)
        self._kappa, self._kappa_pieces = pair(kappa), pieces(kappa, 4)
        self._momentum, self._momentum_pieces = pair(Fraction(momentum)), pieces(Fraction(momentum), 2)
        self.momentum, self.weight_decay = momentum, weight_decay
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
        parts = [np.minimum(rate * piece, _LIMIT) for piece in self._kappa_pieces]  # exact

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


class _Tables:
    """One immutable state of a schedule; only the cache of recent results is replaced."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self._steps = _Steps(momentum, weight_decay)
        self._tame = True
        self.horizon = 0
        self.safe_size = _LARGEST_SAFE
        self._rates = np.zeros(_LEAF, np.float32)  # zeros from the horizon to the end of its leaf
        self._firsts: list[int] = []  # the beginning of each level in `_nodes`
        self._nodes = _IDENTITY  # node j of level k: product of the leaves [j·2^k, (j+1)·2^k); at last the identity
        self._growth = np.zeros((3, 1), np.float32)  # of each node, see `_joined`
        # stop -> starts in ascending order, their products, the same rounded to float32. A fetch of many rows asks for
        # a few hundred distinct (start, stop) thousands of times, block by block.
        self._recent: dict[int, tuple[Int64Array, Float64Array, Float32Array]] = {}

    @property
    def learning_rates(self) -> Float32Array:
        view = self._rates[: self.horizon]
        view.flags.writeable = False
        return view

    @property
    def num_bytes(self) -> int:
        nodes = self._nodes
        return sum(array.nbytes for array in (self._rates, nodes.high, nodes.low, nodes.exponent, self._growth))

    def extended(self, start: int, rates: Float32Array) -> _Tables:
        """Tables with `rates` from step `start` on; products of other segments are copied."""
        stop = start + len(rates)
        tables = copy(self)
        tables._recent = {}
        tables.horizon = horizon = max(self.horizon, stop)
        tables._rates = np.zeros((horizon // _LEAF + 1) * _LEAF, np.float32)
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
        high, low = self._steps.exact(self._rates[first * _LEAF : last * _LEAF].reshape(-1, _LEAF).T)
        norm = self._steps.log_norm(high)
        growth = np.repeat(np.maximum(norm, 0)[None], 3, axis=0)
        while high.shape[2] > 1:
            high, low = matmul((high[:, :, 1::2], low[:, :, 1::2]), (high[:, :, 0::2], low[:, :, 0::2]))
            growth = _joined(growth, norm)
            if self._tame:
                norm = self._steps.log_norm(high)
            else:  # the clipped products understate the growth
                norm = norm[0::2] + norm[1::2]
                low[np.abs(high) > _LIMIT] = 0
                _clip(high, _LIMIT)
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
        return min(size, _LARGEST_SAFE) if size >= 1 else 0.0  # below 1 a coefficient might be beyond float32

    def _largest_growth(self) -> float:
        """log2 of the largest factor by which a row's norm grows between any two steps."""
        largest = until_here = 0.0
        leaf, num_leaves = 0, self.horizon // _LEAF
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
        for some in np.split(rates, range(_SQUARES, len(rates), _SQUARES)):
            power, growth = self._steps.rounded(some), np.zeros(len(some))
            for _ in range(self.horizon.bit_length()):
                growth += np.maximum(self._steps.log_norm(power), 0)
                power = _clip(_product(power, power), _LIMIT)
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
                step += _LEAF << level
                continue
            weight, momentum_buffer = steps.weight_and_momentum(rows)
            end_of_leaf = min((step // _LEAF + 1) * _LEAF, stop)
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
        if step % _LEAF:
            return None
        leaf = step // _LEAF
        for level in reversed(range(len(self._firsts))):
            place = self._firsts[level] + (leaf >> level)
            if leaf % (1 << level) == 0 and step + (_LEAF << level) <= stop and self._growth[0, place] <= room:
                return level, place
        return None

    def transfer(self, start: Int64Array, stop: int) -> tuple[Float64Array, Float32Array]:
        """As `Schedule.transfer`, computing each distinct start once; and the same rounded to float32."""
        nothing = np.array([stop]), np.eye(2)[None], np.eye(2, dtype=np.float32)[None]
        starts, products, coefficients = self._recent.get(stop) or nothing
        position = np.searchsorted(starts, start)
        if (starts.take(position, mode="clip") != start).any():
            missing = np.setdiff1d(start, starts)
            assert 0 <= missing[0] <= missing[-1] < stop <= self.horizon, "0 ≤ start ≤ stop ≤ horizon"
            starts = np.concatenate([starts, missing])
            order = np.argsort(starts)
            starts, products = starts[order], np.concatenate([products, self._products(missing, stop)])[order]
            coefficients = _to_float32(products)
            self._remember(stop, (starts, products, coefficients))
            position = np.searchsorted(starts, start)
        return products.take(position, axis=0), coefficients.take(position, axis=0)

    def _remember(self, stop: int, newest: tuple[Int64Array, Float64Array, Float32Array]) -> None:
        """Caches the newest results, as many as there is room for."""
        room = _RECENT_PRODUCTS
        recent: dict[int, tuple[Int64Array, Float64Array, Float32Array]] = {}
        for key, known in [(stop, newest), *self._recent.items()]:
            room -= len(known[0]) + _RECENT_OVERHEAD
            if room < 0:
                break
            recent.setdefault(key, known)
        self._recent = recent

    def _products(self, start: Int64Array, stop: int) -> Float64Array:
        """transfer(start, stop) for distinct starts (int64 [n], ascending): [n, 2, 2].

        Each goes from the start to the end of its leaf, over whole leaves, then from the beginning of stop's leaf to
        stop.
        """
        leaf, last_leaf = start // _LEAF, stop // _LEAF
        leaves = np.unique(np.append(leaf, last_leaf))
        ends = self._to_end_of_leaf(leaves, stop)
        to_stop, exponent = np.empty((2, 2, len(leaves))), np.zeros(len(leaves), np.int64)
        between, exponent[:-1] = self._between(leaves[:-1] + 1, last_leaf)
        to_stop[..., :-1] = _product(ends[:, :, 0, -1:], between)
        to_stop[..., -1] = np.eye(2)  # products in stop's leaf have reached stop already
        place = np.searchsorted(leaves, leaf)
        product = self._steps.in_u(_product(to_stop[..., place], ends[:, :, start % _LEAF, place]))
        product = _clip(np.ldexp(product, exponent[place]), np.finfo(np.float64).max)
        return np.ascontiguousarray(np.moveaxis(product, -1, 0))

    def _to_end_of_leaf(self, leaf: Int64Array, stop: int) -> Float64Array:
        """Products from each step of leaves (int64 [n]) to the leaf's end or to stop: [2, 2, 16, n]."""
        step = leaf * _LEAF + np.arange(_LEAF)[:, None]
        products = self._steps.rounded(self._rates[step])
        products[:, :, step >= stop] = np.eye(2)[..., None]
        distance = 1
        while distance < _LEAF:  # each product reaches twice as far
            products[:, :, :-distance] = _product(products[:, :, distance:], products[:, :, :-distance])
            if not self._tame:
                _clip(products, _LIMIT)
            distance *= 2
        return products

    def _between(self, leaf: Int64Array, last_leaf: int) -> tuple[Float64Array, Int64Array]:
        """Products of the leaves from each (int64 [n], ≤ last_leaf) to last_leaf − 1, [2, 2, n], and exponents, [n].

        Climbs to ever larger nodes up to the highest bit in which the two differ, then descends.
        """
        highest = np.maximum(np.frexp((leaf ^ last_leaf).astype(np.float64))[1] - 1, 0)
        summit = last_leaf >> highest << highest
        ahead, beyond = summit - leaf, last_leaf - summit
        num_levels = int((ahead | beyond).max(initial=1)).bit_length()
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
            products = _product(products[:, :, 1::2], products[:, :, 0::2])
            more = _power_of_two(products)
            products, exponent = np.ldexp(products, -more), exponent[1::2] + exponent[0::2] + more
        climbed, descended = products[:, :, 0, : len(leaf)], products[:, :, 0, len(leaf) :].swapaxes(0, 1)
        return _product(descended, climbed), exponent[0, : len(leaf)] + exponent[0, len(leaf) :]


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


def _product(later: Float64Array, earlier: Float64Array) -> Float64Array:
    """[2, 2, ...] each: product, product, sum, each rounded."""
    product = later[:, 0, None] * earlier[None, 0]
    product += later[:, 1, None] * earlier[None, 1]
    return product


def _power_of_two(matrices: Float64Array) -> npt.NDArray[np.int32]:
    """log2 of the divisor that brings the largest entry of each, [2, 2, ...], into [1/2, 1): [...]."""
    exponent: npt.NDArray[np.int32] = np.frexp(np.abs(matrices).max(axis=(0, 1)))[1]
    return exponent


def _clip(matrices: Float64Array, limit: float | np.floating) -> Float64Array:
    """Clips to ±limit, in place."""
    np.minimum(matrices, limit, out=matrices)
    return np.maximum(matrices, -limit, out=matrices)


def single_rate_products(momentum: float, weight_decay: float, learning_rate: float, gaps: Int64Array) -> Float64Array:
    """M(η)^t' for each gap t' ≥ 0 (int64 [n], any order, repeats): float64 [n, 2, 2]. Section 2.3 of the paper.

    Computed by squaring, with every product and sum rounded, so that the bits are the same on every processor. A power
    depends on its gap alone.
    """
    distinct, position = np.unique(gaps, return_inverse=True)
    limit = np.sqrt(np.finfo(np.float64).max) / 2  # a sum of two products of numbers up to this is finite
    power = np.array([[1 - learning_rate * weight_decay, -learning_rate * momentum], [weight_decay, momentum]])[
        ..., None
    ]
    product = np.repeat(np.eye(2)[..., None], len(distinct), axis=2)
    with np.errstate(under="ignore"):
        for bit in range(int(distinct.max(initial=0)).bit_length()):
            chosen = (distinct >> bit & 1).astype(bool)
            product[..., chosen] = _clip(_product(power, product[..., chosen]), limit)
            power = _clip(_product(power, power), limit)
    return np.moveaxis(product, -1, 0)[position]


def _to_float32(coefficients: Float64Array) -> Float32Array:
    """Rounds once; numbers beyond float32 become its largest."""
    with np.errstate(under="ignore"):
        return np.clip(coefficients, -_LARGEST, _LARGEST).astype(np.float32)


def bring_to(
    schedule: Schedule,
    stop: int,
    last_step: Int64Array,
    weight: Float32Array,
    momentum_buffer: Float32Array,
    *,
    weight_only: bool = False,
    rows: Int64Array | None = None,
    largest: float = math.inf,
) -> None:
    """Corrects raw rows from last_step (int64 [n], ≤ stop) to `stop` in place: float32 [n, D] each, finite.

    Args:
        last_step: stays as it is.
        weight_only: leave the momentum buffer as it is.
        rows: names of the rows in messages, int64 [n].
        largest: no |value| is beyond it.

    Raises:
        StepError: SGD would make a row infinite or NaN in an update before `stop`; nothing was changed.
    """
    if largest <= schedule.safe_size or all_within(schedule.safe_size, weight, momentum_buffer):
        correct(weight, momentum_buffer, schedule.coefficients(last_step, stop), weight_only=weight_only)
        return
    size = np.maximum(np.abs(weight).max(axis=1), np.abs(momentum_buffer).max(axis=1)).astype(np.float64)
    risky = np.flatnonzero(~(size <= schedule.safe_size))
    w, u = weight[risky].astype(np.float64), momentum_buffer[risky].astype(np.float64)
    schedule.require_finite(last_step[risky], stop, w, u, rows=risky if rows is None else rows[risky])
    products = schedule.products(last_step[risky], stop)
    with np.errstate(over="ignore"):
        beyond = np.flatnonzero(np.abs(products).max(axis=(1, 2)) * np.maximum(size[risky], 1) > _LARGEST / 2)
    correct(weight, momentum_buffer, schedule.coefficients(last_step, stop), weight_only=weight_only)
    if len(beyond):  # float32 may hold the sum of two products that it cannot hold
        w, u, (ww, wu), (uw, uu) = w[beyond], u[beyond], *np.moveaxis(products[beyond], 0, -1)[..., None]
        with np.errstate(over="ignore", under="ignore"):
            weight[risky[beyond]] = _to_float32(ww * w + wu * u)
            if not weight_only:
                momentum_buffer[risky[beyond]] = _to_float32(uw * w + uu * u)


def all_within(size: float, *arrays: Float32Array) -> bool:
    """Whether no |value| is beyond `size`, by one pass; False does not prove that one is."""
    if size < 1:  # squares of small numbers are 0
        return not any(array.any() for array in arrays)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for array in arrays:
            flat = array.reshape(-1)
            if rest := len(flat) // _SQUARES * _SQUARES:
                squares = flat[:rest].reshape(-1, _SQUARES)
                total += float(np.vecdot(squares, squares).sum())
                flat = flat[rest:]
            total += float(flat.dot(flat))
    return total <= size * size


def _not_finite(row: int | np.integer, step: int) -> StepError:
    return StepError(
        f"row {row} would become infinite or NaN in update {step}, nothing was written: "
        "use smaller learning rates or gradients"
    )


def correct(
    weight: Float32Array, momentum_buffer: Float32Array, coefficients: Float32Array, *, weight_only: bool = False
) -> None:
    """Brings raw rows up to date in place: float32 [n, D] and coefficients float32 [n, 2, 2].

    Product, product, sum, each rounded: no fused multiply-add, so that every implementation, on any processor, computes
    the same bits. With `weight_only` the momentum buffer stays as it is. Numbers beyond float32 silently become
    infinite or NaN, as in SGD.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scratch = np.multiply(coefficients[:, 0, 1, None], momentum_buffer)
        if not weight_only:
            momentum_buffer *= coefficients[:, 1, 1, None]
            momentum_buffer += coefficients[:, 1, 0, None] * weight
        weight *= coefficients[:, 0, 0, None]
        weight += scratch


def apply_push(
    schedule: Schedule,
    correction: bool,
    step: int,
    last_step: Int64Array,
    weight: Float32Array,
    momentum_buffer: Float32Array,
    gradient: Float32Array,
    *,
    rows: Int64Array | None = None,
) -> None:
    """Applies the gradient of update `step` to raw rows in place: float32 [n, D] each, last_step int64 [n].

    A row that has not seen the update yet is corrected to it and takes one step of SGD. For a row that has, the
    gradient arrives late: its effect up to now is added, which is exact because the system is linear. Without
    `correction`, rows without a gradient do not move; with a schedule's `single_rate`, two corrections differ from one
    over both gaps. In both cases a late gradient has a defined effect only if the row has seen no later update.

    Overflow is checked before the update, in it, and for a late gradient in the updates since. Of a row that has seen
    later updates only its present state is known: an overflow in between that later gradients undid is not detected.

    Args:
        step: less than schedule.horizon.
        rows: names of the rows in messages, int64 [n].

    Raises:
        StepError: a gradient is too late without correction, or with that of a single learning rate; nothing was
            changed. Or a row becomes infinite or NaN; the arrays are then invalid.
    """
    late = np.flatnonzero(last_step > step)
    if (schedule.single_rate or not correction) and len(late) and last_step[late].max() > step + 1:
        first = int((last_step > step + 1).argmax())
        how = "with the paper's correction" if correction else "without correction"
        raise StepError(
            f"row {first if rows is None else rows[first]} has already seen update {last_step[first] - 1}: {how} "
            f"a gradient of update {step} comes too late for it, push every update's gradients before the next update's"
        )
    if not len(late):
        _apply_on_time(schedule, correction, step, last_step, weight, momentum_buffer, gradient, rows)
        return
    for stop in np.unique(last_step[late]):
        some = late[last_step[late] == stop]
        by_weight, by_momentum = _late_impulse(
            schedule, step, int(stop), gradient[some], some if rows is None else rows[some]
        )
        with np.errstate(over="ignore", invalid="ignore"):
            weight[some] += by_weight
            momentum_buffer[some] += by_momentum
    _require_finite(late if rows is None else rows[late], step, weight[late], momentum_buffer[late])
    on_time = np.flatnonzero(last_step <= step)
    if len(on_time):
        seen, w, u = last_step[on_time], weight[on_time], momentum_buffer[on_time]
        named = on_time if rows is None else rows[on_time]
        _apply_on_time(schedule, correction, step, seen, w, u, gradient[on_time], named)
        last_step[on_time], weight[on_time], momentum_buffer[on_time] = seen, w, u


def _late_impulse(
    schedule: Schedule, step: int, stop: int, gradient: Float32Array, rows: Int64Array
) -> tuple[Float32Array, Float32Array]:
    """The effect of gradients of update `step` (float32 [n, D]) on rows that have seen `stop` updates."""
    learning_rate = float(schedule.learning_rates[step])
    transfer = schedule.transfer(np.array([step + 1]), stop)[0]
    with np.errstate(over="ignore", under="ignore"):
        impulse = _clip(transfer[:, 1] - learning_rate * transfer[:, 0], np.finfo(np.float64).max)
    if all_within(schedule.safe_size / (1 + learning_rate), gradient):
        by_weight, by_momentum = _to_float32(impulse)
        return by_weight * gradient, by_momentum * gradient
    given = gradient.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        _require_finite(rows, step, (-learning_rate * given).astype(np.float32), gradient)
        schedule.require_finite(np.full(len(rows), step + 1), stop, -learning_rate * given, given, rows=rows)
        return _to_float32(impulse[0] * given), _to_float32(impulse[1] * given)


def _require_finite(rows: Int64Array | None, step: int, weight: Float32Array, momentum_buffer: Float32Array) -> None:
    """Raises StepError if update `step` left an infinite value or NaN."""
    if not all_within(_LARGEST_SAFE, weight, momentum_buffer):
        bad = ~(np.isfinite(weight) & np.isfinite(momentum_buffer)).all(axis=1)
        if bad.any():
            raise _not_finite(bad.argmax() if rows is None else rows[bad][0], step)


def _apply_on_time(
    schedule: Schedule,
    correction: bool,
    step: int,
    last_step: Int64Array,
    weight: Float32Array,
    momentum_buffer: Float32Array,
    gradient: Float32Array,
    rows: Int64Array | None,
) -> None:
    """torch.optim.SGD's update `step`, product by product in float32, of rows with last_step ≤ step."""
    if correction and (last_step != step).any():
        bring_to(schedule, step, last_step, weight, momentum_buffer, rows=rows)
    with np.errstate(over="ignore", invalid="ignore"):  # checked below
        scratch = np.multiply(weight, np.float32(schedule.weight_decay))
        scratch += gradient
        momentum_buffer *= np.float32(schedule.momentum)
        momentum_buffer += scratch
        np.multiply(momentum_buffer, schedule.learning_rates[step], out=scratch)
        weight -= scratch
    _require_finite(rows, step, weight, momentum_buffer)
    last_step[:] = step + 1
