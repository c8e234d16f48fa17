"""The oracle of rows: torch.optim.SGD over the whole matrix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from weightserver import RowState, TableSpec
from weightserver.core.initial import initial_rows

Float64Array = npt.NDArray[np.float64]


class Oracle:
    """Dense SGD in float64; without correction only rows with a gradient move."""

    def __init__(self, spec: TableSpec, rates: npt.NDArray[np.float32]) -> None:
        self._spec, self._rates = spec, rates
        self._weight = torch.nn.Parameter(torch.from_numpy(initial_rows(spec, np.arange(spec.num_rows))).double())
        self._momentum = torch.zeros_like(self._weight)
        self._optimizer = torch.optim.SGD([self._weight], momentum=spec.momentum, weight_decay=spec.weight_decay)

    def step(self, step: int, gradient: Float64Array) -> None:
        rate = float(self._rates[step])
        if self._spec.correction:
            self._weight.grad = torch.from_numpy(gradient)
            self._optimizer.param_groups[0]["lr"] = rate
            self._optimizer.step()
            self._momentum = self._optimizer.state[self._weight]["momentum_buffer"]
            return
        moved = torch.from_numpy(np.flatnonzero(gradient.any(axis=1)))
        with torch.no_grad():
            given = torch.from_numpy(gradient)[moved] + self._spec.weight_decay * self._weight[moved]
            self._momentum[moved] = self._spec.momentum * self._momentum[moved] + given
            self._weight[moved] -= rate * self._momentum[moved]

    @property
    def weight(self) -> Float64Array:
        return self._weight.detach().numpy()

    def assert_equals(self, state: RowState) -> None:
        """‖Δ‖/‖row‖ ≤ 1e-5 for every row's weight and momentum buffer."""
        for actual, expected in ((state.weight, self.weight), (state.momentum_buffer, self._momentum.numpy())):
            norm = np.linalg.norm(expected, axis=1)
            assert (np.linalg.norm(actual - expected, axis=1) <= 1e-5 * norm).all()


def schedule(num_steps: int) -> npt.NDArray[np.float32]:
    """Learning rates: warm-up, then cosine."""
    step = np.arange(num_steps)
    warm = num_steps // 10
    return (0.3 * np.where(step < warm, (step + 1) / warm, 0.5 + 0.5 * np.cos(np.pi * step / num_steps))).astype("f4")
