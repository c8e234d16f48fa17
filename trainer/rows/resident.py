"""Rows around the window, with their momentum, on the trainer's device; the servers hold all others."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from trainer.rows.slots import SlotMap
from trainer.rows.store import RowCounters
from trainer.rows.write_back import LeavingRows, WriteBack
from trainer.transfer import HostCopy, to_device
from weightserver import RowState, TableSpec, WeightClient
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.correction import Schedule, bring_to

_ROWS_PER_PART = 1 << 16
"""Rows that are copied from the device at once."""
_SAFE_SIZE = 2.0**30
"""If rows up to this size are safe in any gap, rows are corrected on the device and checked when they leave."""


class ResidentRows:
    """Rows enter before they are active, stay while they are likely to be active again, and leave after that.

    Rows are transferred raw, as (weight, momentum_buffer, last_step), and corrected here, once, when they become active
    (Section 2.3); SGD updates an active row in place in every step. So neither the time nor the path of a row's
    transfer changes a bit of it. The invariants:

    - A row is in one place: on the servers, in a fetch, resident, or in the write-back queue. It is resident, with a
      slot of its own, from the call that announces it, although its values may still be in a fetch.
    - A row that is announced for a step stays at least until that step's gradients were applied. Of all others, the row
      whose last announced step is the oldest leaves first; with the default capacity no row of the window leaves.
    - A row that enters while it is in the write-back queue is taken from there. It is fetched only after the servers
      acknowledged its last write; writes are sent in the order in which rows left.
    - Which rows enter and leave depends only on the announced steps, never on what has arrived.

    Args:
        client: has a table, its schedule and an open session; its owner closes it.
        learning_rates: float32 [num_steps], one for each update.
        capacity: rows held here; at least those of any `prefetch_steps` + 1 consecutive steps.
        prefetch_steps: number of steps by which `prefetch` runs ahead; one fetch gathers the rows of half as many
            steps. write_back_rows: rows written back at once; the queue holds up to four times as many.
    """

    def __init__(
        self,
        client: WeightClient,
        spec: TableSpec,
        learning_rates: Float32Array,
        *,
        capacity: int,
        prefetch_steps: int,
        write_back_rows: int,
        device: torch.device,
    ) -> None:
        self.counters = RowCounters()
        self.prefetch_steps = prefetch_steps
        self._client = client
        self._spec = spec
        self._schedule = Schedule.of_table(spec, learning_rates)
        self._device = device
        self._slots = SlotMap(capacity)
        self._weight = torch.zeros(capacity, spec.dim, device=device)
        self._momentum_buffer = torch.zeros_like(self._weight)
        self._last_step = np.zeros(capacity, np.int64)
        self._changed = np.zeros(capacity, bool)  # since it arrived or was last written back
        self._largest = torch.zeros((), device=device)  # |value| of all rows that were corrected
        self._next_step = 0  # the first step whose gradients were not applied
        self._announced: dict[int, Int64Array] = {}  # step -> slots of its rows
        self._active = np.zeros(0, np.int64)  # slots of the current step's rows
        self._active_on_device = torch.zeros(0, dtype=torch.int64, device=device)  # the same
        self._wanted: list[tuple[Int64Array, Int64Array]] = []  # rows and slots still to be requested
        self._wanted_from = 0  # the first step that needs one of them
        self._coming: deque[tuple[int, Int64Array, Future[RowState]]] = deque()  # first step, slots, values
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._write_back = WriteBack(
            client, batch_rows=write_back_rows, max_rows=4 * write_back_rows, counters=self.counters
        )

    def prefetch(self, rows: Int64Array, *, step: int) -> None:
        self._write_back.raise_error()
        slots = self._slots.find(rows)
        entering = slots < 0
        self._slots.last_announced[slots[~entering]] = step
        if entering.any():
            slots[entering] = self._enter(rows[entering], step)
        self._announced[step] = slots
        if self._wanted and step - self._wanted_from >= self.prefetch_steps // 2:
            self._request()
        self.counters.resident_rows = len(self._slots)

    def _enter(self, rows: Int64Array, step: int) -> Int64Array:
        """Gives new rows slots and takes their values from the write-back queue or requests them."""
        leaving = self._slots.leaving(len(rows), step=self._next_step)
        if len(leaving):
            self._leave(leaving[self._changed[leaving]])
            self._slots.remove(leaving)
        slots = self._slots.add(rows)
        self._slots.last_announced[slots] = step
        self._changed[slots] = False
        here, state = self._write_back.take(rows)
        if state is not None:
            self._place(slots[here], state)
        elsewhere = np.delete(np.arange(len(rows)), here)
        if len(elsewhere):
            self._wanted_from = self._wanted_from if self._wanted else step
            self._wanted.append((rows[elsewhere], slots[elsewhere]))
        return slots

    def _leave(self, slots: Int64Array) -> None:
        """Enqueues rows for writing back in their present state; a GPU copies them while training continues."""
        for start in range(0, len(slots), _ROWS_PER_PART):
            part = slots[start : start + _ROWS_PER_PART]
            chosen = self._tensor(part)
            values = HostCopy([self._weight[chosen], self._momentum_buffer[chosen], self._largest])
            leaving = LeavingRows(values, self._last_step[part], largest_safe=self._schedule.safe_size)
            self._write_back.add(self._slots.row[part], leaving)

    def _request(self) -> None:
        """Starts one fetch of all wanted rows."""
        rows, slots = (np.concatenate(parts) for parts in zip(*self._wanted, strict=True))
        order = np.argsort(rows)
        fetch = self._fetcher.submit(self._fetch, rows[order])
        self._coming.append((self._wanted_from, slots[order], fetch))
        self._wanted = []
        self.counters.prefetch_pending_rows += len(rows)

    def _fetch(self, rows: Int64Array) -> RowState:
        with self.counters.fetching():
            return self._client.fetch_state(rows)

    def _receive(self, step: int) -> None:
        """Waits for all rows that `step` needs and puts them into their slots."""
        if self._wanted and self._wanted_from <= step:
            self._request()
        while self._coming and self._coming[0][0] <= step:
            _, slots, fetch = self._coming[0]
            with self.counters.waiting():
                state = fetch.result()
            self._coming.popleft()
            self._place(slots, state)
            self.counters.fetched(len(slots), _num_bytes(state))
            self.counters.prefetch_pending_rows -= len(slots)

    def _place(self, slots: Int64Array, state: RowState) -> None:
        chosen = self._tensor(slots)
        self._weight[chosen] = self._tensor(state.weight)
        self._momentum_buffer[chosen] = self._tensor(state.momentum_buffer)
        self._last_step[slots] = state.last_step

    def weights(self, rows: Int64Array, *, step: int) -> Tensor:
        if step not in self._announced:
            self.prefetch(rows, step=step)
        self._receive(step)
        self._active = self._announced.pop(step)
        idle = self._active[self._last_step[self._active] < step]
        if self._spec.correction and len(idle):
            self._correct(idle, step)
        self._active_on_device = self._tensor(self._active)
        return self._weight[self._active_on_device]

    def _correct(self, slots: Int64Array, step: int) -> None:
        """Corrects idle rows up to `step`; on a CPU with the same bits as the servers' correction.

        Rows that the correction made infinite or NaN never return to the servers (`LeavingRows`). If the learning rates
        could do so to rows of any size, rows are corrected on the host, which raises StepError.
        """
        if self._schedule.safe_size < _SAFE_SIZE:
            self._correct_on_host(slots, step)
            return
        coefficients = self._tensor(self._schedule.coefficients(self._last_step[slots], step))
        (ww, wu), (uw, uu) = coefficients[:, :, :, None].permute(1, 2, 0, 3)  # (n, 1) each
        chosen = self._tensor(slots)
        weight, momentum_buffer = self._weight[chosen], self._momentum_buffer[chosen]
        self._weight[chosen] = ww * weight + wu * momentum_buffer
        self._momentum_buffer[chosen] = uu * momentum_buffer + uw * weight
        self._last_step[slots] = step
        for values in (weight, momentum_buffer):
            self._largest = torch.maximum(self._largest, torch.linalg.vector_norm(values, ord=float("inf")))

    def _correct_on_host(self, slots: Int64Array, step: int) -> None:
        chosen = self._tensor(slots)
        weight, momentum_buffer = (values[chosen].cpu().numpy() for values in (self._weight, self._momentum_buffer))
        bring_to(self._schedule, step, self._last_step[slots], weight, momentum_buffer, rows=self._slots.row[slots])
        self._weight[chosen], self._momentum_buffer[chosen] = self._tensor(weight), self._tensor(momentum_buffer)
        self._last_step[slots] = step

    @torch.no_grad()
    def apply_gradients(self, rows: Int64Array, gradients: Tensor, *, step: int) -> None:
        active = self._active_on_device
        weight, momentum_buffer = self._weight[active], self._momentum_buffer[active]
        momentum_buffer *= self._spec.momentum
        momentum_buffer += weight * self._spec.weight_decay + gradients
        weight -= momentum_buffer * float(self._schedule.learning_rates[step])
        self._weight[active], self._momentum_buffer[active] = weight, momentum_buffer
        self._last_step[self._active] = step + 1
        self._changed[self._active] = True
        self._next_step = step + 1

    def _tensor(self, array: Int64Array | Float32Array) -> Tensor:
        return to_device(array, self._device)

    def flush(self) -> None:
        held = self._slots.held()
        changed = held[self._changed[held]]
        self._leave(changed)
        self._write_back.flush()
        self._changed[changed] = False

    def read_state(self, rows: Int64Array, *, step: int) -> RowState:
        self.flush()
        return self._client.fetch_state(rows, step=step)

    def close(self) -> None:
        self._fetcher.shutdown(cancel_futures=True)
        self._write_back.close()


def _num_bytes(state: RowState) -> int:
    return state.weight.nbytes + state.momentum_buffer.nbytes + state.last_step.nbytes
