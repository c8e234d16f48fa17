"""Values of the resident rows in their slots: correction (Section 2.3 of the paper) and SGD on the trainer's device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightserver import RowState, TableSpec
from weightserver.core.arrays import Int64Array
from weightserver.core.precision import precision_of
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows.write_back import LeavingRows
from weightserver.torch.transfer import HostCopy, to_device


class _Change(NamedTuple):
    """What an update leaves in slots: int64 (n,), on the host and on the device, and float32 (n, D) each."""

    slots: Int64Array
    on_device: Tensor
    weight: Tensor
    momentum_buffer: Tensor
    last_step: int


class SlotValues:
    """Weight, momentum_buffer and last_step of the row in each of `capacity` slots.

    Weight and momentum_buffer, float32 (capacity, D), are on the device; last_step, int64 (capacity,), is on the host.
    They are raw: a row is corrected aside, once for `weights` and once for `update`, since a step may be forgotten
    between them. An update is made by one assignment; if an interrupt keeps it from the slots, `settle`, which is
    called before anything else, puts it there.
    """

    def __init__(self, spec: TableSpec, rates: LearningRates, capacity: int, device: torch.device) -> None:
        self.weight = torch.zeros(capacity, spec.dim, dtype=torch.float32, device=device)
        self.momentum_buffer = torch.zeros_like(self.weight)
        self.last_step = np.zeros(capacity, np.int64)
        self.changed = np.zeros(capacity, bool)  # by an update since the row arrived or was last written back
        self._num_updates = 0
        self._pending: _Change | None = None
        self._spec = spec
        self._precision = precision_of(spec)
        self._rates = rates
        self._device = device

    @property
    def num_updates(self) -> int:
        """Number of the update after the last one that was made."""
        return self._num_updates if (pending := self._pending) is None else pending.last_step

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._num_updates = number

    def settle(self) -> None:
        """Puts what an interrupt has kept from the slots into them; may be repeated."""
        if (change := self._pending) is None:
            return
        self.weight[change.on_device], self.momentum_buffer[change.on_device] = change.weight, change.momentum_buffer
        self.last_step[change.slots], self.changed[change.slots] = change.last_step, True
        self._num_updates = change.last_step
        self._pending = None

    def extend(self, added: int) -> None:
        """Adds slots."""
        zeros = self.weight.new_zeros(added, self._spec.dim)
        self.weight, self.momentum_buffer = (torch.cat([held, zeros]) for held in (self.weight, self.momentum_buffer))
        self.last_step = np.append(self.last_step, np.zeros(added, np.int64))
        self.changed = np.append(self.changed, np.zeros(added, bool))

    def place(self, slots: Int64Array, state: RowState) -> None:
        """Puts the raw state of rows into slots, int64 (n,)."""
        chosen = self._tensor(slots)
        self.weight[chosen] = self._tensor(state.weight)
        self.momentum_buffer[chosen] = self._tensor(state.momentum_buffer)
        self.last_step[slots] = state.last_step

    def leaving(self, slots: Int64Array, rows: Int64Array) -> LeavingRows:
        """A copy of the raw state of rows in slots, int64 (n,) each; a GPU makes it while training continues."""
        chosen = self._tensor(slots)
        values = HostCopy([self.weight[chosen], self.momentum_buffer[chosen]])
        return LeavingRows(rows, values, self.last_step[slots], self._precision)

    def weights(self, slots: Int64Array, on_device: Tensor, step: int) -> Tensor:
        """The weights in slots, int64 (n,), also given as a tensor on the device, as of `step`: float32 (n, D).

        On a CPU they have the same bits as by the servers' correction. Rows that are infinite or NaN never return to
        the servers (`LeavingRows`).
        """
        weight = self.weight.index_select(0, on_device)  # on a CPU faster than [...]
        idle = self._idle(slots, step)
        if len(idle):
            weight[self._tensor(idle)] = self.peek(slots[idle], step)
        return weight

    def _idle(self, slots: Int64Array, step: int) -> Int64Array:
        """Which of these slots have rows to correct, int64 (m,): none without `spec.correction`."""
        return np.flatnonzero((self.last_step[slots] < step) & bool(self._spec.correction))

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
    def update(self, slots: Int64Array, on_device: Tensor, gradients: Tensor, step: int) -> Int64Array:
        """One step of SGD (Equation 2) on the rows in slots, as `weights` takes them.

        Returns the gaps of the rows that an update had reached before: the steps that each had missed, int64 (m,).
        """
        weight, momentum_buffer = self.weight[on_device], self.momentum_buffer[on_device]
        idle = self._idle(slots, step)
        last_step = self.last_step[slots[idle]]
        if len(idle):
            chosen = self._tensor(idle)
            corrected = self._corrected(weight[chosen], momentum_buffer[chosen], last_step, step)
            weight[chosen], momentum_buffer[chosen] = corrected
        momentum_buffer *= self._spec.momentum
        momentum_buffer += weight * self._spec.weight_decay + gradients
        weight -= momentum_buffer * self._rates.of_step(step)
        self._pending = _Change(slots, on_device, weight, momentum_buffer, step + 1)  # from here on it is made
        self.settle()
        return step - last_step[last_step > 0]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._device)
