"""The oracle of rows: torch.optim.SGD over the whole matrix. tests/helpers/row_model.py is its equal without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tests.helpers.row_model import assert_rows_close
from weightserver import RowState, TableSpec
from weightserver.core.arrays import Float64Array
from weightserver.core.initial import initial_rows
from weightserver.torch.rows import DenseRows


def state_of(store: DenseRows) -> RowState:
    """All rows of a store that holds them all."""
    rows = store._rows
    last_step = np.full(len(rows.weight), rows.num_updates)
    return RowState(rows.weight.numpy(), rows.momentum_buffer.numpy(), last_step)


class Oracle:
    """Dense SGD in float64, for tables with the exact correction."""

    def __init__(self, spec: TableSpec, rates: npt.NDArray[np.float32]) -> None:
        assert spec.correction is True
        self._rates = rates
        self._weight = torch.nn.Parameter(torch.from_numpy(initial_rows(spec, np.arange(spec.num_rows))).double())
        self._optimizer = torch.optim.SGD([self._weight], momentum=spec.momentum, weight_decay=spec.weight_decay)

    def step(self, step: int, gradient: Float64Array) -> None:
        """Makes update `step` with the gradient of all rows, (N, D)."""
        self._weight.grad = torch.from_numpy(gradient)
        self._optimizer.param_groups[0]["lr"] = float(self._rates[step])
        self._optimizer.step()

    @property
    def weight(self) -> Float64Array:
        return self._weight.detach().numpy()

    @property
    def momentum_buffer(self) -> Float64Array:
        buffer: torch.Tensor = self._optimizer.state[self._weight]["momentum_buffer"]
        return buffer.numpy()

    def assert_equals(self, state: RowState) -> None:
        """Compares all rows after the newest update."""
        assert_rows_close(state.weight, self.weight)
        assert_rows_close(state.momentum_buffer, self.momentum_buffer)
