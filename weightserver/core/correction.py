"""How a row moves: SGD's transfer products over a schedule, and the effect of a fetch and of a gradient on raw rows.

A row's state (w, u), weight and momentum buffer, follows torch.optim.SGD with momentum m, weight decay λ and learning
rate η_t in update t. It is linear: without a gradient, update t is

    M_t = [[1 − η_t·λ, −η_t·m], [λ, m]]        transfer(s, t) = M_{t−1} ··· M_s

and a gradient g adds the impulse (−η_t·g, g). So an untouched row is brought up to date by one product of 2×2 matrices,
and the gradients of a row may arrive in any order. The paper's correction takes one learning rate for all steps of a
gap instead, `single_rate_products`; it serves comparisons.

Learning rates under which a single update makes rows grow, η·λ ≥ 2·(1 + m), are refused (`checked_rates`), and so is
a result that is infinite or NaN (`require_finite`).

NumPy only, no I/O.
"""

from __future__ import annotations

from copy import copy

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Float32Array, Float64Array, Int64Array, all_finite
from weightserver.core.errors import StepError
from weightserver.core.spec import TableSpec
from weightserver.core.transfer import TransferTree, times

MAX_STEPS = 1 << 25
"""Most learning rates of a schedule: a month of 12 steps a second. A shard keeps all of them in memory."""


class Schedule:
    """Learning rates of a run's first steps and the transfer products of its rows, about 40 bytes a step. Immutable.

    Args:
        learning_rates: float32 [horizon].
        single_rate: whether a gap is corrected as in the paper, with one learning rate for all its steps; see
            `coefficients`. `transfer` stays the exact product.
    """

    def __init__(
        self, *, momentum: float, weight_decay: float, learning_rates: npt.ArrayLike = (), single_rate: bool = False
    ) -> None:
        self.momentum, self.weight_decay, self.single_rate = momentum, weight_decay, single_rate
        self.horizon = 0
        """Number of learning rates."""
        self._tree = TransferTree(momentum, weight_decay)
        self._append(learning_rates)

    @classmethod
    def of_table(cls, spec: TableSpec, learning_rates: npt.ArrayLike = ()) -> Schedule:
        """The schedule that corrects a table's rows."""
        return cls(
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            learning_rates=learning_rates,
            single_rate=spec.correction == "paper",
        )

    def moves_as(self, other: Schedule) -> bool:
        """Whether both move rows alike under the same learning rates."""
        mine, theirs = ((each.momentum, each.weight_decay, each.single_rate) for each in (self, other))
        return mine == theirs

    @property
    def learning_rates(self) -> Float32Array:
        """Float32 [horizon], read-only."""
        return self._tree.rates(self.horizon)

    @property
    def table_bytes(self) -> int:
        """Bytes of memory that the learning rates and the products take."""
        return self._tree.num_bytes

    def followed_by(self, learning_rates: npt.ArrayLike) -> Schedule:
        """This schedule and further learning rates, float32 [n]; it shares the products with this one, and with others
        that were followed by the same learning rates.

        Raises:
            TypeError, ValueError: see `checked_rates`.
        """
        longer = copy(self)
        longer._append(learning_rates)
        return longer

    def _append(self, learning_rates: npt.ArrayLike) -> None:
        rates = checked_rates(
            learning_rates, momentum=self.momentum, weight_decay=self.weight_decay, start_step=self.horizon
        )
        self._tree = self._tree.with_rates(self.horizon, rates)
        self.horizon += len(rates)

    def transfer(self, start: Int64Array, stop: int) -> Float64Array:
        """M_{stop−1} ··· M_start for each start (int64 [n], any order, repeats): float64 [n, 2, 2].

        0 ≤ start ≤ stop ≤ horizon.
        """
        return self._tree.products(start, stop).reshape(-1, 2, 2)

    def coefficients(self, last_step: Int64Array, stop: int) -> Float32Array:
        """The coefficients by which `correct` brings rows of last_step (int64 [n], ≤ stop) to `stop`: float32
        [n, 2, 2], contiguous.

        The single definition of that arithmetic: transfer products, rounded once; beyond float32 they are infinite.
        With `single_rate` they are powers of M(η), where η is the learning rate of the last finished update, stop − 1:
        the newest of the gap, so that a gap of one step, or of equal learning rates, is corrected exactly, and it is
        known for every step that may be fetched.
        """
        if not self.single_rate:
            return self._tree.coefficients(last_step, stop).reshape(-1, 2, 2)
        rate = float(self.learning_rates[stop - 1]) if stop else 0.0
        with np.errstate(over="ignore"):
            products = single_rate_products(self.momentum, self.weight_decay, rate, stop - last_step)
            return np.ascontiguousarray(products, np.float32)


def checked_rates(
    learning_rates: npt.ArrayLike, *, momentum: float, weight_decay: float, start_step: int
) -> Float32Array:
    """Learning rates of steps from `start_step` on, as float32 [n] without −0.

    Raises:
        TypeError: they are no real numbers.
        ValueError: not one-dimensional, < 0, NaN or infinite; or one update makes some row grow that has no gradient:
            η·λ ≥ 2·(1 + m).
    """
    given = np.asarray(learning_rates)
    if given.size and given.dtype.kind not in "fiu":
        raise TypeError(f"learning_rates must be real numbers, got dtype {given.dtype}")
    if given.ndim != 1:
        raise ValueError(f"learning_rates must have shape [n], got {list(given.shape)}")
    with np.errstate(over="ignore"):
        rates = given.astype(np.float32) + np.float32(0)
    valid = (rates >= 0) & (rates < np.inf)
    if not valid.all():
        first = int(valid.argmin())
        raise ValueError(
            f"the learning rate of step {start_step + first} must be a finite number ≥ 0, got {given[first]}"
        )
    unstable = rates.astype(np.float64) * weight_decay >= 2 * (1 + momentum)
    if unstable.any():
        first = int(unstable.argmax())
        raise ValueError(
            f"the learning rate {rates[first]:g} of step {start_step + first} makes rows grow without a gradient: with "
            f"momentum {momentum:g} and weight decay {weight_decay:g} it must be less than "
            f"{2 * (1 + momentum) / weight_decay:g}"
        )
    return rates


def require_finite(rows: Int64Array, step: int, *values: Float32Array) -> None:
    """Refuses rows that update `step` leaves infinite or NaN.

    Args:
        rows: their names in the message, int64 [n].
        values: their weights and momentum buffers, or one of both, float32 [n, D] each.

    Raises:
        StepError: with the first such row.
    """
    if not all(all_finite(array) for array in values):
        position = int(np.isfinite(np.stack(values)).all(axis=(0, 2)).argmin())
        row = int(rows[position])
        raise StepError(
            f"row {row} would be infinite or NaN after update {step}, nothing was written: use smaller learning rates "
            "or gradients",
            row=row,
            step=step,
        )


def single_rate_products(momentum: float, weight_decay: float, learning_rate: float, gaps: Int64Array) -> Float64Array:
    """M(η)^t' for each gap t' ≥ 0 (int64 [n], any order, repeats): float64 [n, 2, 2]. Section 2.3 of the paper.

    Computed by squaring, with every product and sum rounded, so that the bits are the same on every processor. A power
    depends on its gap alone.
    """
    distinct, position = np.unique(gaps, return_inverse=True)
    power = 1 - learning_rate * weight_decay, -learning_rate * momentum, weight_decay, momentum
    product = np.repeat(np.eye(2).reshape(4, 1), len(distinct), axis=1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for bit in range(int(distinct.max(initial=0)).bit_length()):
            chosen = (distinct >> bit & 1).astype(bool)
            product[:, chosen] = times(power, product[:, chosen])
            power = times(power, power)
    return product.T.take(position, axis=0).reshape(-1, 2, 2)


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
    rows: Int64Array,
) -> None:
    """Applies the gradient of update `step` to raw rows in place: float32 [n, D] each, last_step int64 [n].

    A row that has not seen the update yet is corrected to it and takes one step of SGD. For a row that has, the
    gradient arrives late: its effect up to now is added, which is exact because the system is linear. Without
    `correction`, rows without a gradient do not move; with a schedule's `single_rate`, two corrections differ from one
    over both gaps. In both cases a late gradient has a defined effect only if the row has seen no later update.

    Args:
        step: less than schedule.horizon.
        rows: names of the rows in messages, int64 [n].

    Raises:
        StepError: a gradient is too late without correction, or with that of a single learning rate; nothing was
            changed. Or a result is infinite or NaN; the arrays are then invalid.
    """
    late = np.flatnonzero(last_step > step)
    if (schedule.single_rate or not correction) and len(late) and last_step[late].max() > step + 1:
        first = int((last_step > step + 1).argmax())
        how = "with the paper's correction" if correction else "without correction"
        raise StepError(
            f"row {rows[first]} has already seen update {last_step[first] - 1}: {how} "
            f"a gradient of update {step} comes too late for it, push every update's gradients before the next "
            "update's",
            row=int(rows[first]),
            step=step,
        )
    for stop in np.unique(last_step[late]).tolist():
        some = late[last_step[late] == stop]
        by_weight, by_momentum = _late_impulse(schedule, step, stop)
        with np.errstate(over="ignore", invalid="ignore"):
            weight[some] += by_weight * gradient[some]
            momentum_buffer[some] += by_momentum * gradient[some]
        require_finite(rows[some], stop - 1, weight[some], momentum_buffer[some])
    on_time: slice | Int64Array = np.flatnonzero(last_step <= step) if len(late) else slice(None)
    seen, w, u = last_step[on_time], weight[on_time], momentum_buffer[on_time]  # views, if all rows are
    if correction and (seen != step).any():
        correct(w, u, schedule.coefficients(seen, step))
    with np.errstate(over="ignore", invalid="ignore"):  # what is infinite or NaN stays so until the check
        scratch = np.multiply(w, np.float32(schedule.weight_decay))
        scratch += gradient[on_time]
        u *= np.float32(schedule.momentum)
        u += scratch
        np.multiply(u, schedule.learning_rates[step], out=scratch)
        w -= scratch
    require_finite(rows[on_time], step, w, u)
    if len(late):
        weight[on_time], momentum_buffer[on_time] = w, u
    last_step[on_time] = step + 1


def _late_impulse(schedule: Schedule, step: int, stop: int) -> Float32Array:
    """By which factors a gradient of update `step` moves the weight and the momentum buffer of a row that has seen
    `stop` updates: float32 [2]."""
    learning_rate = float(schedule.learning_rates[step])
    transfer = schedule.transfer(np.array([step + 1]), stop)[0]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        impulse: Float64Array = transfer[:, 1] - learning_rate * transfer[:, 0]
        return impulse.astype(np.float32)
