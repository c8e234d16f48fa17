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

import numpy as np
import numpy.typing as npt

from weightserver.config import TableSpec
from weightserver.errors import StepError

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Matrices = npt.NDArray[np.longdouble]
"""[..., 2, 2]"""

_LEAF = 16
"""Steps in the smallest stored product; shorter ones are multiplied when needed. Bounds the tables' size."""
_CHUNK = 1_024
"""Leaves multiplied at a time, so that their 1 MiB of matrices stays in the cache."""
_RECENT_PRODUCTS = 131_072
"""How many results are remembered, 40 bytes each."""
_RECENT_OVERHEAD = 128
"""What remembering one more stop counts for, so that there are never more than about a thousand."""
_LIMIT = np.sqrt(np.finfo(np.longdouble).max) / 2
"""A sum of two products of numbers up to this is finite: diverging schedules saturate and never give inf or NaN."""


class Schedule:
    """Learning rates of a run and the transfer products of its rows.

    Products over aligned segments of 16·2^k steps are kept, about 12 bytes a step with the learning rates (inverting
    prefix products instead would lose everything: det M = m). Which segments make up a product depends on (start,
    stop) alone, so neither other rows of a call nor the way in which the schedule grew can change a bit.

    Two things keep max|error| / max|product| below 1e-12 over 50,000 steps (see tests/weightserver/test_correction.py):

    - Products are formed in long double. With one learning rate throughout, every step makes the same rounding error,
      and in float64 they add up to more. Also 1 − η·λ, which may nearly vanish, is then known to 5e-20. Where the
      platform's long double is a double, errors are about 2,000 times larger.
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
            self._tables = self._tables.extended(start_step, rates)

    def transfer(self, start: Int64Array, stop: int) -> Float64Array:
        """M_{stop−1} ··· M_start for each start (int64 [n], any order, repeats): float64 [n, 2, 2].

        0 ≤ start ≤ stop ≤ horizon. Beyond float64's range a product is 0 or its largest number, silently.
        """
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


class _Tables:
    """One immutable state of a schedule; only the memory of recent results changes, by replacement."""

    def __init__(self, momentum: float, weight_decay: float) -> None:
        self._momentum = np.longdouble(momentum)
        self._weight_decay = np.longdouble(weight_decay)
        self._kappa = self._weight_decay / (1 + self._momentum)  # κ in `Schedule`
        self.horizon = 0
        self._rates = np.zeros(_LEAF, np.float32)  # zeros from the horizon to the end of its leaf
        self._levels: list[Matrices] = []  # node j of level k: product of the leaves [j·2^k, (j+1)·2^k), in (w, z)
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
        return self._rates.nbytes + sum(level.nbytes for level in self._levels)

    def extended(self, start: int, rates: Float32Array) -> _Tables:
        """Tables with `rates` from step `start` on; products of the segments they do not touch are copied."""
        stop = start + len(rates)
        tables = _Tables(float(self._momentum), float(self._weight_decay))
        tables.horizon = horizon = max(self.horizon, stop)
        tables._rates = np.zeros((horizon // _LEAF + 1) * _LEAF, np.float32)
        tables._rates[: self.horizon] = self._rates[: self.horizon]
        tables._rates[start:stop] = rates
        size = _LEAF
        while size <= horizon:
            old = self._levels[len(tables._levels)] if size <= self.horizon else np.empty((0, 2, 2), np.longdouble)
            nodes = np.empty((horizon // size, 2, 2), np.longdouble)
            first, last = start // size, min(-(-stop // size), len(nodes))
            nodes[:first] = old[:first]
            nodes[last:] = old[last:]
            if size == _LEAF:
                every_leaf = np.arange(first, last) * _LEAF
                nodes[first:last] = tables._leaf_products(every_leaf, every_leaf + _LEAF)
            else:
                halves = tables._levels[-1][2 * first : 2 * last]
                nodes[first:last] = _product(halves[1::2], halves[0::2])
            tables._levels.append(nodes)
            size *= 2
        return tables

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
        """transfer(start, stop) for distinct starts (int64 [n]): climb to ever larger nodes, then descend to stop."""
        leaf, last_leaf = -(-start // _LEAF), stop // _LEAF  # the whole leaves between
        ends = self._leaf_products(np.append(start, last_leaf * _LEAF), np.append(np.minimum(leaf * _LEAF, stop), stop))
        product, tail = ends[:-1], ends[-1]
        past = leaf > last_leaf  # start and stop lie in one leaf: the first product is all
        leaf[past] = last_leaf

        # The descent, shared by all starts: descent[k] goes from last_leaf with its lowest k bits cleared to stop.
        # A start joins it below the highest bit in which its leaf and last_leaf differ.
        joins = np.maximum(np.frexp((leaf ^ last_leaf).astype(np.float64))[1] - 1, 0)
        descent = [tail]
        for level in range(joins.max()):
            node = last_leaf >> level
            descent.append(_product(descent[-1], self._levels[level][node - 1]) if node & 1 else descent[-1])

        # The climb, from each start's first whole leaf to where it joins.
        ahead = (last_leaf >> joins << joins) - leaf
        for level in range(int(ahead.max()).bit_length()):
            climbing = np.flatnonzero(ahead >> level & 1)
            if len(climbing):
                nodes = self._levels[level][leaf[climbing] >> level]
                product[climbing] = _product(nodes, product[climbing])
                leaf[climbing] += 1 << level

        product = np.where(past[:, None, None], product, _product(np.stack(descent)[joins], product))
        with np.errstate(under="ignore"):  # back from (w, z) to (w, u)
            shift = self._kappa * product[:, :, 1]
            product[:, :, 0] += shift
            product[:, 1] -= self._kappa * product[:, 0]
            return _clip(product, np.finfo(np.float64).max).astype(np.float64)

    def _leaf_products(self, first: Int64Array, last: Int64Array) -> Matrices:
        """Products in (w, z) of the steps first … last−1 (int64 [n], each pair within one leaf): [n, 2, 2]."""
        products = np.empty((len(first), 2, 2), np.longdouble)
        for chunk in (slice(i, i + _CHUNK) for i in range(0, len(first), _CHUNK)):
            step = (first[chunk] // _LEAF * _LEAF)[:, None] + np.arange(_LEAF)
            inside = (step >= first[chunk, None]) & (step < last[chunk, None])
            rate = np.where(inside, self._rates[step], np.float32(0)).astype(np.longdouble)
            matrix = np.empty((*step.shape, 2, 2), np.longdouble)  # the identity outside
            # In this order a difference that nearly vanishes keeps its relative precision.
            cosine = ((1 - rate * self._weight_decay) + self._momentum) / (1 + self._momentum)
            matrix[..., 0, 0] = cosine
            matrix[..., 0, 1] = -rate * self._momentum
            matrix[..., 1, 0] = np.where(inside, self._kappa * (1 + cosine), 0)
            matrix[..., 1, 1] = np.where(inside, self._momentum * cosine, 1)
            while matrix.shape[1] > 1:
                matrix = _product(matrix[:, 1::2], matrix[:, 0::2])
            products[chunk] = matrix[:, 0]
        return products


def _product(later: Matrices, earlier: Matrices) -> Matrices:
    with np.errstate(under="ignore"):
        return _clip(later @ earlier, _LIMIT)


def _clip(matrices: Matrices, limit: np.floating) -> Matrices:
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
    power = np.array([[1 - learning_rate * weight_decay, -learning_rate * momentum], [weight_decay, momentum]])
    product = np.repeat(np.eye(2)[None], len(distinct), axis=0)
    for bit in range(int(distinct.max(initial=0)).bit_length()):
        chosen = (distinct >> bit & 1).astype(bool)
        product[chosen] = _product_float64(power, product[chosen])
        power = _product_float64(power, power)
    return _to_float32(product)[position]


def _product_float64(left: Float64Array, right: Float64Array) -> Float64Array:
    """[..., 2, 2], without the fused multiply-adds of a matrix product; saturates as `_product` does."""
    limit = np.sqrt(np.finfo(np.float64).max) / 2
    with np.errstate(under="ignore"):
        terms = left[..., :, :, None] * right[..., None, :, :]
        return np.clip(terms[..., 0, :] + terms[..., 1, :], -limit, limit)


def _to_float32(coefficients: Float64Array) -> Float32Array:
    """Rounds once; what float32 cannot hold becomes its largest number."""
    largest = float(np.finfo(np.float32).max)
    with np.errstate(under="ignore"):
        return np.clip(coefficients, -largest, largest).astype(np.float32)


def correct(
    weight: Float32Array, momentum_buffer: Float32Array, coefficients: Float32Array, *, weight_only: bool = False
) -> None:
    """Brings raw rows up to date in place: float32 [n, D] and coefficients float32 [n, 2, 2].

    Product, product, sum, each rounded: no fused multiply-add, so that every place that corrects gets the same bits.
    With `weight_only` the momentum buffer is left as it was.
    """
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
        impulse = _to_float32(transfer @ np.array([-learning_rate, 1.0]))
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
