"""All rows in the trainer's memory, updated by torch.optim.SGD: the oracle, and the simplest choice for small data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weightserver import RowState, TableSpec
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.initial import initial_rows
from weightserver.core.sharding import Sharding
from weightserver.torch.rates import LearningRates, as_learning_rates
from weightserver.torch.rows.store import RowCounters
from weightserver.torch.transfer import to_device


class DenseRows:
    """Plain SGD over the whole matrix; inactive rows have a zero gradient, so weight decay and momentum still move
    them.

    Without `spec.correction` only active rows move (the paper's ablation, Table 2).

    Args:
        learning_rates: float32 [num_steps], one for each update; or those told so far.
        sharding, shard: this rank's share of the rows; all rows by default.
    """

    prefetch_steps = 0

    def __init__(
        self,
        spec: TableSpec,
        learning_rates: Float32Array | LearningRates,
        *,
        device: torch.device | str = "cpu",
        sharding: Sharding | None = None,
        shard: int = 0,
    ) -> None:
        assert spec.correction != "paper", "all rows move in each step: there is no gap to correct"
        self.counters = RowCounters()
        self._spec = spec
        self._rates = as_learning_rates(spec, learning_rates)
        self._sharding = sharding or Sharding(spec.rows_per_block, 1)
        held = self._sharding.rows_of_shard(shard, spec.num_rows)
        self.counters.resident_rows = len(held)
        weight = torch.from_numpy(initial_rows(spec, held)).to(device)  # (N, D)
        self._weight = torch.nn.Parameter(weight)
        self._weight.grad = torch.zeros_like(weight)
        self._momentum_buffer = torch.zeros_like(weight)  # only used without correction
        self.fresh = np.zeros(0, bool)
        self._is_fresh = np.ones(len(held), bool)  # of each held row
        self._active = (np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64))  # rows, and their positions
        self._optimizer = torch.optim.SGD(
            [self._weight], lr=0.0, momentum=spec.momentum, weight_decay=spec.weight_decay
        )

    def reserve(self, capacity: int) -> None:
        """Does nothing: there is no limit."""

    def prefetch(self, rows: Int64Array, *, step: int) -> None:
        """Does nothing: the rows are in memory."""

    def forget_announced(self, *, in_progress: bool) -> None:
        """Does nothing."""

    def weights(self, rows: Int64Array, *, step: int) -> Tensor:
        self.fresh = self._is_fresh[self._sharding.local(rows)]
        return self._weight.detach()[self._positions(rows)]

    def _positions(self, rows: Int64Array) -> Tensor:
        """Positions of rows in the matrix, on the device; cached, since each step needs them twice."""
        if rows is not self._active[0]:
            self._active = rows, to_device(self._sharding.local(rows), self._weight.device)
        return self._active[1]

    @torch.no_grad()
    def begin(self, positions: Int64Array, weight: Tensor) -> None:
        chosen = self._active[1][to_device(positions, self._weight.device)]
        self._weight[chosen] = weight
        for momentum_buffer in (self._momentum_buffer, self._optimizer.state[self._weight].get("momentum_buffer")):
            if momentum_buffer is not None:
                momentum_buffer[chosen] = 0

    def apply_gradients(self, rows: Int64Array, gradients: Tensor, *, step: int) -> None:
        learning_rate = self._rates.of_step(step)
        self._is_fresh[self._sharding.local(rows)] = False
        active = self._positions(rows)
        if not self._spec.correction:
            self._update_active(active, gradients, learning_rate)
            return
        assert self._weight.grad is not None
        self._weight.grad.zero_()
        self._weight.grad[active] = gradients
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()

    @torch.no_grad()
    def _update_active(self, active: Tensor, gradients: Tensor, learning_rate: float) -> None:
        weight, momentum_buffer = self._weight[active], self._momentum_buffer[active]
        momentum_buffer.mul_(self._spec.momentum).add_(gradients + self._spec.weight_decay * weight)
        self._momentum_buffer[active] = momentum_buffer
        self._weight[active] = weight - learning_rate * momentum_buffer

    def read_state(self, rows: Int64Array, *, step: int) -> RowState:
        momentum_buffer = self._optimizer.state[self._weight].get("momentum_buffer")
        if momentum_buffer is None:  # without correction, or before the first update
            momentum_buffer = self._momentum_buffer
        chosen = to_device(self._sharding.local(rows), self._weight.device)
        return RowState(
            weight=self._weight.detach()[chosen].cpu().numpy(),
            momentum_buffer=momentum_buffer[chosen].cpu().numpy(),
            last_step=np.full(len(rows), step, np.int64),
        )

    def peek(self, rows: Int64Array, *, step: int) -> Tensor:
        return self._weight.detach()[to_device(self._sharding.local(rows), self._weight.device)]

    def flush(self) -> None:
        """Does nothing: these rows are not stored outside the trainer."""

    def close(self) -> None:
        """Does nothing."""
