"""How a row moves: SGD's transfer products over a schedule, and what a fetch and a pushed gradient do to raw rows.

A row's state (w, u), weight and momentum buffer, follows torch.optim.SGD with momentum m, weight decay λ and learning
rate η_t in update t. It is linear: without a gradient, update t is

    M_t = [[1 − η_t·λ, −η_t·m], [λ, m]]        transfer(s, t) = M_{t−1} ··· M_s

and a gradient g adds the impulse (−η_t·g, g). So an untouched row is brought up to date by one product of 2×2 matrices,
and the gradients of a row may arrive in any order. The paper's correction takes one learning rate for all steps of a
gap instead, `single_rate_coefficients`; it is there to compare with.

NumPy only, no I/O.
"""

from __future__ import annotations

import itertools
from copy import copy
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from weightserver.config import TableSpec
from weightserver.double_double import Float64Array, Pair, matmul, pair, pieces, times, two_sum
from weightserver.errors import StepError

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

_LEAF = 16
"""Steps in the smallest stored product; shorter ones are multiplied when needed. Bounds the tables' size."""
_CHUNK = 256
"""Products made at a time, so that they stay in the cache."""
_RECENT_PRODUCTS = 131_072
"""How many results are remembered, 40 bytes each."""
_RECENT_OVERHEAD = 128
"""What remembering one more stop counts for, so that there are never more than about a thousand."""
_LIMIT = 2.0**480
"""A product of two numbers up to this is far from infinite: diverging schedules saturate and never give inf or NaN."""
_LARGEST_KAPPA = Fraction(2**240)
_TAME = 2.0**30
"""Where no entry of a step is beyond this, 16 steps stay below the limit."""


class Schedule:
    """Learning rates of a run and the transfer products of its rows.

    Products over aligned segments of 16·2^k steps are kept, about 13 bytes a step with the learning rates (inverting
    prefix products instead would lose everything: det M = m). Which segments make up a product depends on (start,
    stop) alone, so neither other rows of a call nor the way in which the schedule grew can change a bit.

    The bits are the same on every processor: IEEE float64 additions and multiplications make them, each a NumPy call of
    its own (no long double, no BLAS, no fused multiply-add).

    Two things keep max|error| / max|product| below 1e-12 over 50,000 steps (see tests/weightserver/test_correction.py):

    - Products are formed in double-double numbers (`double_double`). With one learning rate throughout, every step
      makes the same rounding error, and in float64 they add up to more. Also 1 − η·κ, which may nearly vanish, is known
      to 1e-31.
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
        """That by which a table's rows are corrected."""
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
        """float32 [horizon], read-only."""
        return self._tables.learning_rates

    @property
    def table_bytes(self) -> int:
        """Memory that the learning rates and the products take."""
        return self._tables.num_bytes

    def extend(self, start_step: int, learning_rates: npt.ArrayLike) -> None:
        """Sets the learning rates (float32 [n]) of steps start_step … start_step+n−1; those known beyond stay known.

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
            with np.errstate(over="ignore", under="ignore"):
                self._tables = self._tables.extended(start_step, rates)

    def transfer(self, start: Int64Array, stop: int) -> Float64Array:
        """M_{stop−1} ··· M_start for each start (int64 [n], any order, repeats): float64 [n, 2, 2].

        0 ≤ start ≤ stop ≤ horizon. Beyond float64's range a product is 0 or its largest number, silently.
        """
        with np.errstate(over="ignore", under="ignore"):
            return self._tables.transfer(start, stop)

    def coefficients(self, last_step: Int64Array, stop: int) -> Float32Array:
        """What `correct` multiplies rows of last_step (int64 [n]) by to bring them to `stop`: float32 [n, 2, 2].

        The one definition of that arithmetic: transfer products, rounded once. With `single_rate` they are powers of
        M(η), η the learning rate of the last finished update, stop − 1: the newest of the gap, so that a gap of one
        step, or of equal learning rates, is corrected exactly, and it is known wherever a row may be fetched.
        """
        if self.single_rate:
            rate = float(self.learning_rates[stop - 1]) if stop else 0.0
            return single_rate_coefficients(self.momentum, self.weight_decay, rate, stop - last_step)
        return _to_float32(self.transfer(last_step, stop))


@dataclass(frozen=True)
class _Nodes:
    """Products of updates in (w, z), in double-double, divided by powers of two so that none leaves float64's range."""

    high: Float64Array
    low: Float64Array
    """[2, 2, n] each, the largest entry in [1/2, 1)."""
    exponent: Int64Array
    """[n]: of what they were divided by."""

    @classmethod
    def scaled(cls, product: Pair, exponent: Int64Array | int = 0) -> _Nodes:
        """From products [2, 2, n] of any size, divided by 2^exponent before."""
        high, low = product
        more = _power_of_two(high)
        return cls(np.ldexp(high, -more), np.ldexp(low, -more), more + np.int64(exponent))

    @classmethod
    def empty(cls, number: int) -> _Nodes:
        return cls(np.empty((2, 2, number)), np.empty((2, 2, number)), np.empty(number, np.int64))

    def put(self, place: int, nodes: _Nodes) -> None:
        """From `place` on."""
        some = slice(place, place + len(nodes))
        self.high[..., some], self.low[..., some], self.exponent[some] = nodes.high, nodes.low, nodes.exponent

    def __len__(self) -> int:
        return len(self.exponent)

    def __getitem__(self, some: slice) -> _Nodes:
        return _Nodes(self.high[..., some], self.low[..., some], self.exponent[some])

    def halved(self) -> _Nodes:
        """Each two neighbours multiplied."""
        earlier, later = self[0::2], self[1::2]
        product = matmul((later.high, later.low), (earlier.high, earlier.low))
        return _Nodes.scaled(product, earlier.exponent + later.exponent)


_IDENTITY = _Nodes(np.eye(2)[..., None], np.zeros((2, 2, 1)), np.zeros(1, np.int64))


def _sizes(horizon: int) -> list[int]:
    """Steps in a node of each level that has one."""
    return [_LEAF << level for level in range((horizon // _LEAF).bit_length())]


class _Steps:
    """Single updates as matrices in (w, z), for any learning rates of one momentum and weight decay."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        kappa = min(Fraction(weight_decay) / (1 + Fraction(momentum)), _LARGEST_KAPPA)
        self._kappa, self._kappa_pieces = pair(kappa), pieces(kappa, 4)
        self._momentum, self._momentum_pieces = pair(Fraction(momentum)), pieces(Fraction(momentum), 2)

    def are_tame(self, rates: Float32Array) -> bool:
        """Whether products of 16 of them need no clipping."""
        (kappa, _), largest = self._kappa, float(rates.max(initial=0))
        return bool((1 + kappa) * (1 + largest) * (2 + largest * kappa) < _TAME)

    def exact(self, rates: Float32Array) -> Pair:
        """Updates of these learning rates (float32 [...]) in double-double, [2, 2, ...]."""
        rate = rates.astype(np.float64)
        cosine, one_more = self._cosines(rate)
        high, low = np.empty((2, 2, *rate.shape)), np.empty((2, 2, *rate.shape))
        high[0, 0], low[0, 0] = cosine
        high[0, 1], low[0, 1] = two_sum(*(rate * -piece for piece in self._momentum_pieces))
        high[1, 0], low[1, 0] = times(self._kappa, one_more)
        high[1, 1], low[1, 1] = times(self._momentum, cosine)
        return high, low

    def rounded(self, rates: Float32Array) -> Float64Array:
        """The same in float64, each entry within 2^-52 of itself."""
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
        """A product in (w, z), [2, 2, n], in (w, u); in place."""
        kappa = self._kappa[0]
        product[:, 0] += kappa * product[:, 1]
        product[1] -= kappa * product[0]
        return product


class _Tables:
    """One immutable state of a schedule; only the memory of recent results changes, by replacement."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self._steps = _Steps(momentum, weight_decay)
        self._tame = True
        self.horizon = 0
        self._rates = np.zeros(_LEAF, np.float32)  # zeros from the horizon to the end of its leaf
        self._firsts: list[int] = []  # where each level begins in `_nodes`
        self._nodes = _IDENTITY  # node j of level k: product of the leaves [j·2^k, (j+1)·2^k); at last the identity
        # stop -> starts in ascending order and their products. A fetch of many rows asks for a few hundred distinct
        # (start, stop) thousands of times, block by block.
        self._recent: dict[int, tuple[Int64Array, Float64Array]] = {}

    @property
    def learning_rates(self) -> Float32Array:
        view = self._rates[: self.horizon]
        view.flags.writeable = False
        return view

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._rates, self._nodes.high, self._nodes.low, self._nodes.exponent))

    def extended(self, start: int, rates: Float32Array) -> _Tables:
        """Tables with `rates` from step `start` on; products of the segments they do not touch are copied."""
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
        tables._firsts, tables._nodes = first_nodes[:-1], nodes
        nodes.put(first_nodes[-1], _IDENTITY)
        for level, size in enumerate(_sizes(horizon)):
            here = first_nodes[level]
            first, last = start // size, min(-(-stop // size), counts[level])
            if level < len(self._firsts):
                old = self._nodes[self._firsts[level] :][: self.horizon // size]
                nodes.put(here, old[:first])
                nodes.put(here + last, old[last:])
            for i in range(first, last, _CHUNK):
                end = min(i + _CHUNK, last)
                if level:
                    below = first_nodes[level - 1]
                    nodes.put(here + i, nodes[below + 2 * i : below + 2 * end].halved())
                else:
                    nodes.put(here + i, tables._leaves(i, end))
        return tables

    def _leaves(self, first: int, last: int) -> _Nodes:
        """Products of the whole leaves first … last−1."""
        high, low = self._steps.exact(self._rates[first * _LEAF : last * _LEAF].reshape(-1, _LEAF).T)
        while high.shape[2] > 1:
            high, low = matmul((high[:, :, 1::2], low[:, :, 1::2]), (high[:, :, 0::2], low[:, :, 0::2]))
            if not self._tame:
                low[np.abs(high) > _LIMIT] = 0
                _clip(high, _LIMIT)
        return _Nodes.scaled((high[:, :, 0], low[:, :, 0]))

    def transfer(self, start: Int64Array, stop: int) -> Float64Array:
        """As `Schedule.transfer`, each distinct start computed once."""
        starts, products = self._recent.get(stop) or (np.array([stop]), np.eye(2)[None])
        position = np.searchsorted(starts, start)
        if (starts.take(position, mode="clip") != start).any():
            missing = np.setdiff1d(start, starts)
            assert 0 <= missing[0] <= missing[-1] < stop <= self.horizon, "0 ≤ start ≤ stop ≤ horizon"
            starts = np.concatenate([starts, missing])
            order = np.argsort(starts)
            starts, products = starts[order], np.concatenate([products, self._products(missing, stop)])[order]
            self._remember(stop, starts, products)
            position = np.searchsorted(starts, start)
        return products[position]

    def _remember(self, stop: int, starts: Int64Array, products: Float64Array) -> None:
        """Keeps the newest results, as many as there is room for."""
        room = _RECENT_PRODUCTS
        recent: dict[int, tuple[Int64Array, Float64Array]] = {}
        for key, known in [(stop, (starts, products)), *self._recent.items()]:
            room -= len(known[0]) + _RECENT_OVERHEAD
            if room < 0:
                break
            recent.setdefault(key, known)
        self._recent = recent

    def _products(self, start: Int64Array, stop: int) -> Float64Array:
        """transfer(start, stop) for distinct starts (int64 [n], ascending): [n, 2, 2].

        From a start to the end of its leaf, over whole leaves, and from the beginning of stop's leaf to stop.
        """
        leaf, last_leaf = start // _LEAF, stop // _LEAF
        leaves = np.unique(np.append(leaf, last_leaf))
        ends = self._to_end_of_leaf(leaves, stop)
        to_stop, exponent = np.empty((2, 2, len(leaves))), np.zeros(len(leaves), np.int64)
        between, exponent[:-1] = self._between(leaves[:-1] + 1, last_leaf)
        to_stop[..., :-1] = _product(ends[:, :, 0, -1:], between)
        to_stop[..., -1] = np.eye(2)  # whatever lies in stop's leaf has come to stop already
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

        Climbs to ever larger nodes as far as the highest bit in which the two differ, then descends.
        """
        highest = np.maximum(np.frexp((leaf ^ last_leaf).astype(np.float64))[1] - 1, 0)
        summit = last_leaf >> highest << highest
        ahead, beyond = summit - leaf, last_leaf - summit
        num_levels = int((ahead | beyond).max(initial=1)).bit_length()
        level = np.arange(1 << (num_levels - 1).bit_length())[:, None]
        first, identity = np.zeros_like(level), len(self._nodes) - 1
        firsts = self._firsts[:num_levels]  # none where not even a leaf is whole
        first[: len(firsts), 0] = firsts
        climb = np.where(ahead >> level & 1, first + (leaf + (ahead & (1 << level) - 1) >> level), identity)
        descent = np.where(beyond >> level & 1, first + (last_leaf >> level) - 1, identity)
        chosen = np.concatenate([climb, descent], axis=1)
        products, exponent = self._nodes.high[:, :, chosen], self._nodes.exponent[chosen]
        # Pairs of levels, then pairs of those: products that depend on the levels alone, not on their number. What is
        # climbed comes in the order of the levels; what is descended in the opposite one, hence transposed.
        products[..., len(leaf) :] = products[..., len(leaf) :].swapaxes(0, 1).copy()
        while products.shape[2] > 1:
            products = _product(products[:, :, 1::2], products[:, :, 0::2])
            more = _power_of_two(products)
            products, exponent = np.ldexp(products, -more), exponent[1::2] + exponent[0::2] + more
        climbed, descended = products[:, :, 0, : len(leaf)], products[:, :, 0, len(leaf) :].swapaxes(0, 1)
        return _product(descended, climbed), exponent[0, : len(leaf)] + exponent[0, len(leaf) :]


def _product(later: Float64Array, earlier: Float64Array) -> Float64Array:
    """[2, 2, ...] each: product, product, sum, each rounded."""
    product = later[:, 0, None] * earlier[None, 0]
    product += later[:, 1, None] * earlier[None, 1]
    return product


def _power_of_two(matrices: Float64Array) -> npt.NDArray[np.int32]:
    """By which to divide each, [2, 2, ...], so that its largest entry lies in [1/2, 1): [...]."""
    exponent: npt.NDArray[np.int32] = np.frexp(np.abs(matrices).max(axis=(0, 1)))[1]
    return exponent


def _clip(matrices: Float64Array, limit: float | np.floating) -> Float64Array:
    """In place."""
    np.minimum(matrices, limit, out=matrices)
    return np.maximum(matrices, -limit, out=matrices)


def single_rate_coefficients(
    momentum: float, weight_decay: float, learning_rate: float, gaps: Int64Array
) -> Float32Array:
    """M(η)^t' for each gap t' ≥ 0 (int64 [n], any order, repeats): float32 [n, 2, 2]. Section 2.3 of the paper.

    By squaring, in float64 products and sums that are rounded one by one, so the same on every processor; rounded once
    more. A power depends on its gap alone.
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
    return _to_float32(np.moveaxis(product, -1, 0))[position]


def _to_float32(coefficients: Float64Array) -> Float32Array:
    """Rounds once; what float32 cannot hold becomes its largest number."""
    largest = float(np.finfo(np.float32).max)
    with np.errstate(under="ignore"):
        return np.clip(coefficients, -largest, largest).astype(np.float32)


def correct(
    weight: Float32Array, momentum_buffer: Float32Array, coefficients: Float32Array, *, weight_only: bool = False
) -> None:
    """Brings raw rows up to date in place: float32 [n, D] and coefficients float32 [n, 2, 2].

    Product, product, sum, each rounded: no fused multiply-add, so that every place that corrects, on any
    processor, gets the same bits.
    With `weight_only` the momentum buffer is left as it was. What float32 cannot hold becomes infinite or NaN silently,
    as in SGD.
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

    A row that has not seen the update yet is corrected to it and takes one step of SGD. To one that has, the gradient
    arrives late: what it would have become by now is added, which is exact because the system is linear. Without
    `correction` rows that get no gradient stand still; with a schedule's `single_rate` two corrections are not the one
    over both gaps. In both cases a late gradient has a defined effect only if the row has seen no later update.
    `step` < schedule.horizon; `rows` (int64 [n]) only names rows in messages.

    Raises:
        StepError: too late without correction, or with that of a single learning rate; then nothing was changed.
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
        _apply_on_time(schedule, correction, step, last_step, weight, momentum_buffer, gradient)
        return
    learning_rate = float(schedule.learning_rates[step])
    for stop in np.unique(last_step[late]):
        some = late[last_step[late] == stop]
        transfer = schedule.transfer(np.array([step + 1]), int(stop))[0]
        impulse = _to_float32(transfer[:, 1] - learning_rate * transfer[:, 0])
        weight[some] += impulse[0] * gradient[some]
        momentum_buffer[some] += impulse[1] * gradient[some]
    on_time = np.flatnonzero(last_step <= step)
    if len(on_time):
        seen, w, u = last_step[on_time], weight[on_time], momentum_buffer[on_time]
        _apply_on_time(schedule, correction, step, seen, w, u, gradient[on_time])
        last_step[on_time], weight[on_time], momentum_buffer[on_time] = seen, w, u


def _apply_on_time(
    schedule: Schedule,
    correction: bool,
    step: int,
    last_step: Int64Array,
    weight: Float32Array,
    momentum_buffer: Float32Array,
    gradient: Float32Array,
) -> None:
    """torch.optim.SGD's update `step`, product by product in float32, of rows with last_step ≤ step."""
    if correction and (last_step != step).any():
        correct(weight, momentum_buffer, schedule.coefficients(last_step, step))
    scratch = np.multiply(weight, np.float32(schedule.weight_decay))
    scratch += gradient
    momentum_buffer *= np.float32(schedule.momentum)
    momentum_buffer += scratch
    np.multiply(momentum_buffer, schedule.learning_rates[step], out=scratch)
    weight -= scratch
    last_step[:] = step + 1
