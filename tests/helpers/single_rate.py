"""The oracle of the paper's correction: each row for itself, in float64, step by step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.rows import RowCounters
from weightserver import RowState, TableSpec
from weightserver.core.initial import initial_rows

Float64Array = npt.NDArray[np.float64]


class SingleRateRows:
    """Rows that are corrected when they are next looked at, by equation (2) without a gradient, as often as they missed
    it, each time with the learning rate of the last finished update. A store of the trainer too."""

    prefetch_steps = 0

    def __init__(self, spec: TableSpec, learning_rates: npt.NDArray[np.float32]) -> None:
        self.counters = RowCounters()
        self._spec = spec
        self._rates = learning_rates.astype(np.float64)
        self.weight = initial_rows(spec, np.arange(spec.num_rows)).astype(np.float64)
        self.momentum_buffer = np.zeros_like(self.weight)
        self.last_step = np.zeros(spec.num_rows, np.int64)

    def at(self, rows: npt.NDArray[np.int64], step: int) -> tuple[Float64Array, Float64Array]:
        """Weight and momentum buffer before update `step`."""
        weight, momentum_buffer = self.weight[rows], self.momentum_buffer[rows]
        gaps = step - self.last_step[rows]
        assert (gaps >= 0).all()
        for missed in range(gaps.max(initial=0)):
            idle = gaps > missed
            weight[idle], momentum_buffer[idle] = self._moved(weight[idle], momentum_buffer[idle], step - 1)
        return weight, momentum_buffer

    def update(self, rows: npt.NDArray[np.int64], gradients: Float64Array, step: int) -> None:
        """Makes update `step` of distinct rows."""
        weight, momentum_buffer = self.at(rows, step)
        self.weight[rows], self.momentum_buffer[rows] = self._moved(weight, momentum_buffer, step, gradients)
        self.last_step[rows] = step + 1

    def _moved(
        self, weight: Float64Array, momentum_buffer: Float64Array, step: int, gradient: Float64Array | float = 0.0
    ) -> tuple[Float64Array, Float64Array]:
        momentum_buffer = self._spec.momentum * momentum_buffer + (gradient + self._spec.weight_decay * weight)
        return weight - self._rates[step] * momentum_buffer, momentum_buffer

    # ---- the trainer's protocol

    def prefetch(self, rows: npt.NDArray[np.int64], *, step: int) -> None:
        pass

    def weights(self, rows: npt.NDArray[np.int64], *, step: int) -> Tensor:
        return torch.from_numpy(self.at(rows, step)[0].astype(np.float32))

    def apply_gradients(self, rows: npt.NDArray[np.int64], gradients: Tensor, *, step: int) -> None:
        self.update(rows, gradients.double().numpy(), step)

    def read_state(self, rows: npt.NDArray[np.int64], *, step: int) -> RowState:
        weight, momentum_buffer = self.at(rows, step)
        return RowState(weight.astype(np.float32), momentum_buffer.astype(np.float32), np.full(len(rows), step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
