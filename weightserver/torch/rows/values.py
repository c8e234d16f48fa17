"""Values of the resident rows in their slots: correction (Section 2.3 of the paper) and SGD on the trainer's device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightserver import RowState, TableSpec
from weightserver.core.arrays import Int64Array
from weightserver.core.precision import precision_of
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows.write_back import LeavingRows
from weightserver.torch.threads import in_threads
from weightserver.torch.transfer import HostCopy, to_device

_VALUES_OF_PART = 1 << 17
"""A CPU updates rows in parts of this many values, 512 KiB, so that what it computes between is still in its cache."""


class SlotValues:
    """Weight, momentum_buffer and last_step of the row in each of `capacity` slots.

    Weight and momentum_buffer, float32 (capacity, D), are on the device; last_step, int64 (capacity,), is on the host.
    """

    def __init__(self, spec: TableSpec, rates: LearningRates, capacity: int, device: torch.device) -> None:
        self.weight = torch.zeros(capacity, spec.dim, device=device)
        self.momentum_buffer = torch.zeros_like(self.weight)
        self.last_step = np.zeros(capacity, np.int64)
        self.fresh = np.zeros(capacity, bool)  # no update has reached the row, although it may have been corrected
        self._spec = spec
        self._precision = precision_of(spec)
        self._rates = rates
        self._device = device

    def extend(self, added: int) -> None:
        """Adds slots."""
        zeros = self.weight.new_zeros(added, self._spec.dim)
        self.weight, self.momentum_buffer = (torch.cat([held, zeros]) for held in (self.weight, self.momentum_buffer))
        self.last_step = np.append(self.last_step, np.zeros(added, np.int64))
        self.fresh = np.append(self.fresh, np.zeros(added, bool))

    def place(self, slots: Int64Array, state: RowState) -> None:
        """Puts the raw state of rows into slots, int64 (n,)."""
        chosen = self._tensor(slots)
        self.weight[chosen] = self._tensor(state.weight)
        self.momentum_buffer[chosen] = self._tensor(state.momentum_buffer)
        self.last_step[slots] = state.last_step
        self.fresh[slots] = state.last_step == 0

    def leaving(self, slots: Int64Array, rows: Int64Array) -> LeavingRows:
        """A copy of the raw state of rows in slots, int64 (n,) each; a GPU makes it while training continues."""
        chosen = self._tensor(slots)
        values = HostCopy([self.weight[chosen], self.momentum_buffer[chosen]])
        return LeavingRows(rows, values, self.last_step[slots], precision=self._precision)

    def correct(self, slots: Int64Array, step: int) -> Int64Array:
        """Corrects the rows in `slots` up to `step`; on a CPU with the same bits as the servers' correction.

        Returns the gaps of the rows that an update had reached before: the steps that each had missed, int64 (m,).

        Rows that are infinite or NaN never return to the servers (`LeavingRows`). Without `spec.correction` rows do not
        change.
        """
        idle = self.last_step[slots] < step
        if not self._spec.correction or not idle.any():
            return np.zeros(0, np.int64)
        slots = slots[idle]
        gaps = step - self.last_step[slots[~self.fresh[slots]]]
        chosen = self._tensor(slots)
        corrected = self._corrected(self.weight[chosen], self.momentum_buffer[chosen], self.last_step[slots], step)
        # All at once: a row whose correction failed half-way would be corrected twice.
        (self.weight[chosen], self.momentum_buffer[chosen]), self.last_step[slots] = corrected, step
        return gaps

    def _corrected(
        self, weight: Tensor, momentum_buffer: Tensor, last_step: Int64Array, step: int
    ) -> tuple[Tensor, Tensor]:
        """Weight and momentum_buffer, float32 (n, D) each, as of `step`: Equation (3)."""
        coefficients = self._tensor(self._rates.schedule(step).coefficients(last_step, step))
        (ww, wu), (uw, uu) = coefficients[:, :, :, None].permute(1, 2, 0, 3)  # (n, 1) each
        return ww * weight + wu * momentum_buffer, uu * momentum_buffer + uw * weight

    def corrected(self, weight: Tensor, momentum_buffer: Tensor, last_step: Int64Array, step: int) -> Tensor:
        """Weights as of `step`, of raw rows elsewhere: float32 (n, D)."""
        if not self._spec.correction:
            return weight
        corrected, _ = self._corrected(weight, momentum_buffer, last_step, step)
        return torch.where(self._tensor(last_step < step)[:, None], corrected, weight)

    def peek(self, slots: Int64Array, step: int) -> Tensor:
        """The weights in slots, int64 (n,), as of `step`, which stay as they are: float32 (n, D)."""
        chosen = self._tensor(slots)
        return self.corrected(self.weight[chosen], self.momentum_buffer[chosen], self.last_step[slots], step)

    @torch.no_grad()
    def begin(self, slots: Int64Array, weight: Tensor) -> None:
        """Puts new rows, float32 (n, D), in place of corrected ones in slots, int64 (n,), without momentum."""
        chosen = self._tensor(slots)
        self.weight[chosen] = weight
        self.momentum_buffer[chosen] = 0

    @torch.no_grad()
    def update(self, slots: Int64Array, on_device: Tensor, gradients: Tensor, step: int) -> None:
        """One step of SGD (Equation 2) on the rows in slots, int64 (n,), also given as a tensor on the device."""
        rate = self._rates.of_step(step)
        weight, momentum_buffer = (values.index_select(0, on_device) for values in (self.weight, self.momentum_buffer))

        def update(part: tuple[Tensor, Tensor, Tensor]) -> None:
            weight, momentum_buffer, gradient = part
            momentum_buffer *= self._spec.momentum
            momentum_buffer += weight * self._spec.weight_decay + gradient
            weight -= momentum_buffer * rate

        rows = max(1, _VALUES_OF_PART // self._spec.dim if self._device.type == "cpu" else len(slots))
        parts = (torch.split(values, rows) for values in (weight, momentum_buffer, gradients))
        in_threads(update, list(zip(*parts, strict=True)))
        self.weight[on_device], self.momentum_buffer[on_device] = weight, momentum_buffer
        self.last_step[slots], self.fresh[slots] = step + 1, False

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._device)
