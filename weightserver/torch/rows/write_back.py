"""Rows on their way back to the servers."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightserver import RowState, WeightClient
from weightserver.core.arrays import Int64Array
from weightserver.core.correction import require_finite
from weightserver.core.errors import (
    AuthenticationError,
    OverloadedError,
    ShardUnavailableError,
    StorageError,
    WeightServerError,
    WrongShardError,
)
from weightserver.core.precision import MOMENTUM_BUFFER, WEIGHT, Precision
from weightserver.torch.rows.store import RowCounters
from weightserver.torch.transfer import HostCopy

_PASSING = (ShardUnavailableError, OverloadedError, WrongShardError, AuthenticationError, StorageError)
"""Errors after which servers that return, or take the token, would make the same write."""


@dataclass(frozen=True, eq=False)
class LeavingRows:
    """The raw state of n rows that leave; its copy from a GPU to the host may still be in progress.

    It is rounded as the servers store it, so that a row is the same whether it is taken from the queue or fetched.
    """

    rows: Int64Array  # (n,)
    values: HostCopy  # weight and momentum_buffer, float32 (n, D) each
    last_step: Int64Array  # (n,)
    precision: Precision

    @cached_property
    def state(self) -> RowState:
        """Waits for the copy; any thread may ask for it. Raises StepError if a row is infinite or NaN."""
        weight, momentum_buffer = (values.numpy() for values in self.values.wait())
        require_finite(self.rows, int(self.last_step.max(initial=0)) - 1, weight, momentum_buffer)
        as_stored = self.precision.as_if_stored
        return RowState(
            weight=as_stored(weight, self.rows, self.last_step, WEIGHT),
            momentum_buffer=as_stored(momentum_buffer, self.rows, self.last_step, MOMENTUM_BUFFER),
            last_step=self.last_step,
        )


class WriteBack:
    """A bounded queue of rows to write back. One thread writes them in order, `batch_rows` or more per write.

    Until a write is durable, its rows can be taken from the queue. A write that failed, and those behind it, are sent
    again once its error was raised, if servers that return, have space again or take the token would take it, or the
    error was none of theirs: the client knows where it was applied.
    """

    def __init__(self, client: WeightClient, *, batch_rows: int, counters: RowCounters) -> None:
        self._client = client
        self._batch_rows = batch_rows
        self._max_rows = 4 * batch_rows  # for as many, `make_room` makes room
        self._counters = counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write-back")
        self._gathered: list[LeavingRows] = []
        self._num_gathered = 0
        self._writes: deque[tuple[list[LeavingRows], Future[None]]] = deque()
        self._newest: dict[int, tuple[LeavingRows, int]] = {}  # row -> its newest state in the queue

    def __len__(self) -> int:
        """Number of rows in the queue."""
        return self._num_gathered + sum(len(part.rows) for parts, _ in self._writes for part in parts)

    def make_room(self, num_rows: int) -> None:
        """Waits until the queue has room for this many more rows, or until no write is in progress."""
        with self._counters.waiting():
            while self._writes and (self._writes[0][1].done() or len(self) + num_rows > self._max_rows):
                self._forget_oldest()

    def add(self, leaving: LeavingRows) -> None:
        """Enqueues distinct rows, whether there is room or not."""
        self._gathered.append(leaving)
        self._num_gathered += len(leaving.rows)
        self._newest.update((row, (leaving, index)) for index, row in enumerate(leaving.rows.tolist()))
        if self._num_gathered >= self._batch_rows:
            self._write()
        self._counters.write_back_pending_rows = len(self)

    def take(self, rows: Int64Array) -> tuple[Int64Array, RowState | None]:
        """Positions in `rows` of those in the queue, and their newest raw states; they are still written."""
        found = [(position, *self._newest[row]) for position, row in enumerate(rows.tolist()) if row in self._newest]
        if not found:
            return np.zeros(0, np.int64), None
        states = [(leaving.state, index) for _, leaving, index in found]
        state = RowState(
            weight=np.stack([state.weight[index] for state, index in states]),
            momentum_buffer=np.stack([state.momentum_buffer[index] for state, index in states]),
            last_step=np.stack([state.last_step[index] for state, index in states]),
        )
        return np.array([position for position, _, _ in found]), state

    def flush(self) -> None:
        """Returns once all rows are durable on the servers."""
        self._write()
        with self._counters.waiting():
            while self._writes:
                self._forget_oldest()
        self._counters.write_back_pending_rows = 0

    def raise_error(self) -> None:
        """Raises the error of a write that failed."""
        for number, (_, write) in enumerate(self._writes):
            if write.done():
                self._wait(number)

    def close(self) -> None:
        """Finishes the write in progress; rows that were not flushed are lost."""
        self._thread.shutdown(cancel_futures=True)

    def _write(self) -> None:
        if self._gathered:
            before = self._writes[-1][1] if self._writes else None
            self._writes.append((self._gathered, self._thread.submit(self._send, self._gathered, before)))
            self._gathered, self._num_gathered = [], 0

    def _send(self, parts: list[LeavingRows], before: Future[None] | None) -> None:
        """Writes a batch, unless the one before it failed; of a row that left more than once, only its newest state."""
        if before is not None:
            before.result()
        rows, states = np.concatenate([part.rows for part in parts]), [part.state for part in parts]
        distinct, from_end = np.unique(rows[::-1], return_index=True)
        chosen = len(rows) - 1 - from_end
        weight, momentum_buffer, last_step = (
            np.concatenate(arrays)[chosen]
            for arrays in zip(*((s.weight, s.momentum_buffer, s.last_step) for s in states), strict=True)
        )
        self._client.write_state(distinct, weight, momentum_buffer, last_step)
        self._counters.pushed(len(distinct), 2 * weight.size, len(last_step))

    def _wait(self, number: int) -> None:
        """Waits for a write, the oldest being number 0; raises its error."""
        write = self._writes[number][1]
        try:
            write.result()
        except Exception as error:
            is_final = isinstance(error, WeightServerError) and not isinstance(error, _PASSING)
            is_of_a_signal = not write.done() or write.exception() is not error
            if is_final or is_of_a_signal:
                raise
            before = None
            for failed in range(number, len(self._writes)):
                parts, _ = self._writes[failed]
                before = self._thread.submit(self._send, parts, before)
                self._writes[failed] = parts, before
            raise

    def _forget_oldest(self) -> None:
        """Waits for the oldest write and removes its rows from the queue: the servers have them now."""
        self._wait(0)
        parts, _ = self._writes[0]
        self._writes.popleft()
        for leaving in parts:
            for row in leaving.rows.tolist():
                if (newest := self._newest.get(row)) is not None and newest[0] is leaving:
                    del self._newest[row]
