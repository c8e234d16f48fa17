"""All rows in the trainer's memory, updated by torch.optim.SGD: the oracle, and the simplest choice for small data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.sgd import sgd

from weightserver import TableSpec
from weightserver.core.arrays import Int64Array
from weightserver.core.initial import initial_rows
from weightserver.core.sharding import Sharding
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows.store import RowCounters, RowStore
from weightserver.torch.transfer import to_device


class _Rows(NamedTuple):
    """All rows after some updates."""

    weight: Tensor
    """float32 (N, D)."""
    momentum_buffer: Tensor
    """float32 (N, D)."""
    num_updates: int


class DenseRows(RowStore):
    """Plain SGD over the whole matrix; inactive rows have a zero gradient, so weight decay and momentum still move
    them. An update is computed on a copy, which one assignment makes the rows.

    Without `spec.correction` only active rows move (the paper's ablation, Table 2).

    Args:
        rates: those of the updates, as far as they are known.
        sharding, shard: this rank's share of the rows; all rows by default.
    """

    def __init__(
        self,
        spec: TableSpec,
        rates: LearningRates,
        *,
        device: torch.device | str = "cpu",
        sharding: Sharding | None = None,
        shard: int = 0,
    ) -> None:
        assert spec.correction != "paper", "all rows move in each step: there is no gap to correct"
        self.counters = RowCounters()
        self._spec = spec
        self._rates = rates
        self._sharding = sharding or Sharding(spec.rows_per_block, 1)
        held = self._sharding.rows_of_shard(shard, spec.num_rows)
        self.counters.resident_rows = len(held)
        weight = torch.from_numpy(initial_rows(spec, held)).to(device)  # (N, D)
        self._rows = _Rows(weight, torch.zeros_like(weight), num_updates=0)
        self._active = (np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64))  # rows, and their positions

    @property
    def num_updates(self) -> int:
        return self._rows.num_updates

    def weights(self, rows: Int64Array, *, step: int) -> Tensor:
        return self._rows.weight[self._positions(rows)]

    def _positions(self, rows: Int64Array) -> Tensor:
        """Positions of rows in the matrix, on the device; cached, since each step needs them twice."""
        if rows is not self._active[0]:
            self._active = rows, to_device(self._sharding.local(rows), self._rows.weight.device)
        return self._active[1]

    @torch.no_grad()
    def apply_gradients(self, rows: Int64Array, gradients: Tensor, *, step: int) -> None:
        active = self._positions(rows)
        weight, momentum_buffer = self._rows.weight.clone(), self._rows.momentum_buffer.clone()
        if self._spec.correction:
            gradient = torch.zeros_like(weight)
            gradient[active] = gradients
            self._sgd(weight, gradient, momentum_buffer, step)
        else:
            moving, buffer = weight[active], momentum_buffer[active]
            self._sgd(moving, gradients, buffer, step)
            weight[active], momentum_buffer[active] = moving, buffer
        self._rows = _Rows(weight, momentum_buffer, step + 1)  # from here on the update is made

    def _sgd(self, weight: Tensor, gradient: Tensor, momentum_buffer: Tensor, step: int) -> None:
        """What torch.optim.SGD does to these rows, in place."""
        sgd(
            [weight],
            [gradient],
            [momentum_buffer],
            lr=self._rates.of_step(step),
            momentum=self._spec.momentum,
            weight_decay=self._spec.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def peek(self, rows: Int64Array, *, step: int) -> Tensor:
        return self._rows.weight[to_device(self._sharding.local(rows), self._rows.weight.device)]
