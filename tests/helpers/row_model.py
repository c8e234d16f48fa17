"""The model of rows: SGD in float64, update by update. Every test of rows compares with it or with torch.optim.SGD.

It does not import torch, for tests that run without it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightserver import RowState, TableSpec
from weightserver.core.arrays import Float32Array, Float64Array, Int64Array
from weightserver.core.initial import initial_rows

NEVER_WRITTEN = -1


class Row(NamedTuple):
    """One row, and the calls that made it what it is, where a test numbers them."""

    weight: Float64Array  # (D,)
    momentum_buffer: Float64Array  # (D,)
    last_step: int
    written_by: int = NEVER_WRITTEN
    pushed_by: frozenset[int] = frozenset()
    """Pushes since it was written, in any order: they commute."""


class RowModel:
    """How rows move: Equation (2) of the paper in each update, and the variant of the correction in a gap.

    `spec.correction`: True makes up for each missed update with its own learning rate, "paper" for as many with the
    learning rate of the newest.
    """

    def __init__(self, spec: TableSpec, learning_rates: npt.ArrayLike) -> None:
        self.spec = spec
        self.rates = np.asarray(learning_rates, np.float32).astype(np.float64)
        self.transfers = functools.cache(self._transfers)
        self.impulses = functools.cache(self._impulses)

    def initial(self, rows: Iterable[int]) -> list[Row]:
        """Rows that were never written."""
        weights = initial_rows(self.spec, np.array(list(rows), np.int64)).astype(np.float64)
        return [Row(weight, np.zeros(self.spec.dim), 0) for weight in weights]

    def updated(
        self, weight: Float64Array, momentum_buffer: Float64Array, step: int, gradient: Float64Array | float = 0.0
    ) -> tuple[Float64Array, Float64Array]:
        """Weights and momentum buffers after update `step`, computed as SGD does."""
        momentum_buffer = self.spec.momentum * momentum_buffer + (gradient + self.spec.weight_decay * weight)
        return weight - self.rates[step] * momentum_buffer, momentum_buffer

    def _transfers(self, step: int) -> Float64Array:
        """Matrices that bring (weight, momentum buffer) from 0 … step finished updates to `step`, (step + 1, 2, 2)."""
        transfers = np.empty((step + 1, 2, 2))
        transfers[step] = np.eye(2)
        for missed in reversed(range(step)):
            (weight, momentum), newest = np.eye(2), self.spec.correction == "paper"
            idle = self.updated(weight, momentum, step - 1 if newest else missed)
            transfers[missed] = transfers[missed + 1] @ idle
        return transfers

    def _impulses(self, step: int) -> Float64Array:
        """The effect of a gradient of 1 in each update 0 … step−1 on the state before update `step`: (step, 2)."""
        impulses = np.stack([-self.rates[:step], np.ones(step)], axis=1)
        return (self.transfers(step)[1:] @ impulses[:, :, None])[:, :, 0]

    def at(self, row: Row, step: int) -> Row:
        """The row after `step` ≥ last_step finished updates."""
        if step == row.last_step:
            return row
        weight, momentum = self.transfers(step)[row.last_step] @ np.stack([row.weight, row.momentum_buffer])
        return row._replace(weight=weight, momentum_buffer=momentum, last_step=step)

    def pushed(self, row: Row, step: int, gradient: Float64Array) -> Row:
        """The row with update `step`'s gradient added, whether it has seen that update or not: SGD is linear."""
        row = self.at(row, max(row.last_step, step + 1))
        of_weight, of_momentum = self.impulses(row.last_step)[step]
        return row._replace(
            weight=row.weight + of_weight * gradient, momentum_buffer=row.momentum_buffer + of_momentum * gradient
        )


class TableModel:
    """All rows of a table, each moved when it gets a gradient: `update` by `update`, in the order of the steps."""

    def __init__(self, spec: TableSpec, learning_rates: npt.ArrayLike) -> None:
        self.model = RowModel(spec, learning_rates)
        self.weight = initial_rows(spec, np.arange(spec.num_rows)).astype(np.float64)
        self.momentum_buffer = np.zeros_like(self.weight)
        self.last_step = np.zeros(spec.num_rows, np.int64)

    def at(self, rows: Int64Array, step: int) -> tuple[Float64Array, Float64Array]:
        """Weight and momentum buffer before update `step`, (n, D) each."""
        state = np.stack([self.weight[rows], self.momentum_buffer[rows]], axis=1)
        moved = self.model.transfers(step)[self.last_step[rows]] @ state
        return moved[:, 0], moved[:, 1]

    def update(self, rows: Int64Array, gradients: Float64Array, step: int) -> None:
        """Makes update `step` of distinct rows."""
        self.weight[rows], self.momentum_buffer[rows] = self.model.updated(*self.at(rows, step), step, gradients)
        self.last_step[rows] = step + 1

    def assert_equals(self, state: RowState, step: int) -> None:
        """Compares all rows before update `step`."""
        weight, momentum_buffer = self.at(np.arange(len(self.weight)), step)
        assert_rows_close(state.weight, weight)
        assert_rows_close(state.momentum_buffer, momentum_buffer)


def assert_rows_close(actual: Float32Array, expected: Float64Array) -> None:
    """‖Δ‖ ≤ 1e-5 · ‖row‖ for every row: hundreds of updates in float32, each rounded by at most 2⁻²³ of it."""
    error = np.linalg.norm(actual - expected, axis=1)
    assert (error <= 1e-5 * np.linalg.norm(expected, axis=1)).all(), error.max()


def schedule(num_steps: int) -> Float32Array:
    """Learning rates: warm-up, then cosine."""
    step = np.arange(num_steps)
    warm = num_steps // 10
    return (0.3 * np.where(step < warm, (step + 1) / warm, 0.5 + 0.5 * np.cos(np.pi * step / num_steps))).astype("f4")
