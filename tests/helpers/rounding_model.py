"""The error model of rows in bfloat16: how far rows may lie from exact SGD, for certain and by chance."""

from __future__ import annotations

import numpy as np

from tests.helpers.row_model import RowModel
from weightserver import RowState, TableSpec
from weightserver.core.arrays import Float32Array, Float64Array, Int64Array
from weightserver.core.initial import initial_rows

ROUNDING_ERROR = 2.0**-7
"""The largest relative error of a rounded value; of subnormal ones, 2^-133 in all."""
_ARITHMETIC = 2.0**-20
"""Relative error of an update in float32, generously."""


class RoundedRows:
    """SGD of all rows in float64, with the errors that storing after each push adds.

    A stored value x has an error of at most ε·|x| more, and of ε·|x|/2 in standard deviation (a value between two
    numbers of distance d becomes one of them, with a variance of at most d²/4, and d ≤ ε·|x|). A pushed gradient has
    one of its own. Later updates are linear, so they move errors as they move rows.
    """

    def __init__(self, spec: TableSpec, rates: Float32Array) -> None:
        self._model = RowModel(spec, rates)
        weight = initial_rows(spec, np.arange(spec.num_rows)).astype(np.float64)
        self.last_step = np.zeros(spec.num_rows, np.int64)
        self.exact = np.stack([weight, np.zeros_like(weight)], axis=1)  # (N, 2, D)
        self.bound = np.zeros_like(self.exact)
        """The largest possible |error|."""
        self.covariance = np.zeros((spec.num_rows, 2, 2, spec.dim))
        """Of the errors of weight and momentum buffer; an upper bound if a row is pushed once in each step."""

    def push(self, rows: Int64Array, gradients: Float32Array, step: int) -> None:
        """Update `step` with gradients of distinct rows, float32 [n, D], on time or late."""
        stop = np.maximum(self.last_step[rows], step + 1)
        for end in np.unique(stop):
            some = stop == end
            self._move(rows[some], end)
            effect = self._model.impulses(end)[step][None, :, None] * gradients[some, None, :].astype(np.float64)
            self.exact[rows[some]] += effect
            self._add_rounding(rows[some], effect)
        self._add_rounding(rows, np.abs(self.exact[rows]) + self.bound[rows])

    def _move(self, rows: Int64Array, stop: int) -> None:
        transfer = self._model.transfers(stop)[self.last_step[rows]]  # (n, 2, 2)
        self.exact[rows] = transfer @ self.exact[rows]
        self.bound[rows] = np.abs(transfer) @ self.bound[rows]
        self.covariance[rows] = np.einsum("nij,njkd,nlk->nild", transfer, self.covariance[rows], transfer)
        self.last_step[rows] = stop

    def _add_rounding(self, rows: Int64Array, values: Float64Array) -> None:
        """The errors of values (n, 2, D) that are rounded, one after another: a gradient is rounded once for both."""
        self.bound[rows] += (ROUNDING_ERROR + _ARITHMETIC) * np.abs(values)
        for array in range(2):
            self.covariance[rows, array, array] += (ROUNDING_ERROR / 2 * values[:, array]) ** 2

    def check(self, state: RowState, step: int) -> Float64Array:
        """Checks all rows as fetched for `step`; returns their errors in standard deviations, (N, 2, D)."""
        rows = np.arange(len(self.exact))
        self._move(rows, step)
        found = np.stack([state.weight, state.momentum_buffer], axis=1).astype(np.float64)
        self._add_rounding(rows, np.abs(self.exact) + self.bound)  # the answer is rounded too
        error = found - self.exact
        assert (np.abs(error) <= self.bound).all(), (np.abs(error) / self.bound).max()
        return error / np.sqrt(np.maximum(np.einsum("niid->nid", self.covariance), 1e-60))
