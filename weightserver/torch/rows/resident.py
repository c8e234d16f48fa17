"""Rows around the window, with their momentum, on the trainer's device; the servers hold all others."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from weightserver import TableSpec, WeightClient
from weightserver.core.arrays import Int64Array
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows.arriving import ArrivingRows
from weightserver.torch.rows.slots import SlotMap
from weightserver.torch.rows.store import RowCounters, RowStore
from weightserver.torch.rows.values import SlotValues
from weightserver.torch.rows.write_back import WriteBack
from weightserver.torch.transfer import to_device

_ROWS_PER_PART, _BYTES_PER_PART = 1 << 16, 1 << 28
"""Rows that are copied from the device at once, at most, and their bytes; their blocks may have four times as many. Up
to two parts are written together: a shard takes writes of 1 GiB, and has by default 4 GiB for them and their blocks."""


class ResidentRows(RowStore):
    """Holds rows from before they are active until they are unlikely to be active again.

    Rows are transferred and held raw, as (weight, momentum_buffer, last_step), and corrected here, once, for the step
    that updates them (Section 2.3). So neither the time nor the path of a row's transfer changes a bit of it, and no
    step that is forgotten does. The invariants:

    - A row is in one place: on the servers, in a fetch, resident, or in the write-back queue. It is resident, with a
      slot of its own, from the call that announces it, although its values may still be in a fetch.
    - A row that is announced for a step stays at least until that step's gradients were applied. Of all others, the row
      whose last announced step is the oldest leaves first; with the default capacity no row of the window leaves.
    - A row that enters while it is in the write-back queue is taken from there. It is fetched only after the servers
      acknowledged its last write; writes are sent in the order in which rows left.
    - Which rows enter and leave depends only on the announced steps, never on what has arrived.
    - In a table of bfloat16, a row is rounded when it leaves, and all rows are at a `flush`: then the resident rows are
      those that the servers hold, as in a run that resumes there. In between they are float32.

    Args:
        client: has a table, its schedule and an open session; its owner closes it.
        rates: those of the updates, as far as they are known.
        capacity: rows held here; at least those of any `prefetch_steps` + 1 consecutive steps.
        prefetch_steps: number of steps by which `prefetch` runs ahead; one fetch gathers the rows of half as many
            steps. write_back_rows: rows written back at once; the queue holds up to four times as many, or 65,536
            of the rows that leave in one step.
    """

    def __init__(
        self,
        client: WeightClient,
        spec: TableSpec,
        rates: LearningRates,
        *,
        capacity: int,
        prefetch_steps: int,
        write_back_rows: int,
        device: torch.device,
    ) -> None:
        self.counters = RowCounters(value_bytes=spec.value_bytes)
        self.prefetch_steps = prefetch_steps
        self._client = client
        self._device = device
        row_bytes, self._rows_per_block = 2 * spec.value_bytes * spec.dim, spec.rows_per_block
        self._rows_per_part = min(_ROWS_PER_PART, max(1, _BYTES_PER_PART // row_bytes))
        self._blocks_per_part = max(1, 4 * _BYTES_PER_PART // (spec.rows_per_block * row_bytes))
        self._is_rounded = spec.dtype != "float32"
        self._slots = SlotMap(capacity)
        self._values = SlotValues(spec, rates, capacity, device)
        self._announced: dict[int, Int64Array] = {}  # step -> slots of its rows
        self._active = np.zeros(0, np.int64)  # slots of the current step's rows
        self._active_on_device = torch.zeros(0, dtype=torch.int64, device=device)  # the same
        self._arriving = ArrivingRows(client, gathered_steps=prefetch_steps // 2, counters=self.counters)
        batch_rows = min(write_back_rows, self._rows_per_part, self._blocks_per_part)
        self._write_back = WriteBack(client, batch_rows=batch_rows, counters=self.counters)

    @property
    def num_updates(self) -> int:
        return self._values.num_updates

    def reserve(self, capacity: int) -> None:
        """Adds slots up to `capacity`."""
        self._values.settle()
        if (added := capacity - len(self._slots.row)) > 0:
            self._slots.extend(added)
            self._values.extend(added)

    def prefetch(self, rows: Int64Array, *, step: int) -> None:
        self._values.settle()
        self._write_back.raise_error()
        self._client.require_session()
        slots = self._slots.find(rows)
        entering = slots < 0
        held = slots[~entering]  # a step that is repeated is announced anew: the rows are needed by later ones too
        self._slots.last_announced[held] = np.maximum(self._slots.last_announced[held], step)
        if entering.any():
            slots[entering] = self._enter(rows[entering], step)
        self._announced[step] = slots
        self._arriving.request_if_due(step)
        self.counters.resident_rows = len(self._slots)

    def _enter(self, rows: Int64Array, step: int) -> Int64Array:
        """Gives new rows slots and takes their values from the write-back queue or requests them."""
        leaving = self._slots.leaving(len(rows), step=self.num_updates)
        if len(leaving):
            self._leave(leaving[self._values.changed[leaving]])
            self._slots.remove(leaving)
        queued, state = self._write_back.take(rows)
        try:
            slots = self._slots.add(rows)
            self._slots.last_announced[slots] = step
            self._values.changed[slots] = False
            if state is not None:
                self._values.place(slots[queued], state)
            elsewhere = np.delete(np.arange(len(rows)), queued)
            if len(elsewhere):
                self._arriving.want(rows[elsewhere], slots[elsewhere], step)
        except BaseException:  # a row without values would be taken for one that has arrived
            entered = self._slots.find(rows)
            self._slots.remove(entered[entered >= 0])
            raise
        return slots

    def _leave(self, slots: Int64Array, *, keep: bool = False) -> None:
        """Enqueues rows for writing back in their present state; with `keep` their slots then hold them as written."""
        for part in self._parts(slots):
            self._write_back.make_room(len(part))
            leaving = self._values.leaving(part, self._slots.row[part])
            self._write_back.add(leaving)
            if keep and self._is_rounded:
                self._values.place(part, leaving.state)

    def _parts(self, slots: Int64Array) -> list[Int64Array]:
        """The slots in parts of few enough rows and blocks."""
        if len(slots) <= min(self._rows_per_part, self._blocks_per_part):
            return [slots] if len(slots) else []
        slots = slots[np.argsort(self._slots.row[slots])]
        block = np.unique(self._slots.row[slots] // self._rows_per_block, return_inverse=True)[1]
        ends = np.diff(np.arange(len(slots)) // self._rows_per_part) + np.diff(block // self._blocks_per_part)
        return np.split(slots, np.flatnonzero(ends) + 1)

    def forget_announced(self, *, in_progress: bool) -> None:
        self._values.settle()
        for slots, state in self._arriving.receive(sys.maxsize):  # their slots may be given to other rows then
            self._values.place(slots, state)
        self._announced.clear()
        last_announced = self._slots.last_announced
        np.minimum(last_announced, self.num_updates - 1, out=last_announced)
        if in_progress:
            last_announced[self._active] = self.num_updates

    def weights(self, rows: Int64Array, *, step: int) -> Tensor:
        self._values.settle()
        is_late = step not in self._announced
        if is_late:
            self.prefetch(rows, step=step)
        active = self._announced.pop(step)  # before what may fail: a step that is repeated is late
        # Rows of a late step may be in a fetch that is noted for a later one.
        for slots, state in self._arriving.receive(sys.maxsize if is_late else step):
            self._values.place(slots, state)
        self._active, self._values.num_updates = active, step
        self._active_on_device = to_device(self._active, self._device)
        return self._values.weights(self._active, self._active_on_device, step)

    def apply_gradients(self, rows: Int64Array, gradients: Tensor, *, step: int) -> None:
        self.counters.corrected(self._values.update(self._active, self._active_on_device, gradients, step))

    def flush(self) -> None:
        self._values.settle()
        held = self._slots.held()
        changed = held[self._values.changed[held]]
        self._leave(changed, keep=True)
        self._write_back.flush()
        self._values.changed[changed] = False

    def peek(self, rows: Int64Array, *, step: int) -> Tensor:
        self._values.settle()
        queued, state = self._write_back.take(rows)  # before the fetch: what is in neither is on the servers
        slots = self._slots.find(rows)
        is_newer = np.flatnonzero((slots >= 0) & self._values.changed[slots])
        weight = to_device(self._client.fetch(rows, step=step), self._device)
        if state is not None:
            raw = to_device(state.weight, self._device), to_device(state.momentum_buffer, self._device)
            weight[to_device(queued, self._device)] = self._values.corrected(*raw, state.last_step, step)
        if len(is_newer):
            weight[to_device(is_newer, self._device)] = self._values.peek(slots[is_newer], step)
        return weight

    def close(self) -> None:
        self._arriving.close()
        self._write_back.close()
