"""Rows on their way from the servers to resident slots: gathered into few fetches, in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from weightserver import RowState, WeightClient
from weightserver.core.arrays import Int64Array
from weightserver.torch.rows.store import RowCounters


@dataclass
class _Fetch:
    """Rows that were requested, and the slots that they go to."""

    first_step: int
    """The first one that needs them."""
    rows: Int64Array
    slots: Int64Array
    state: Future[RowState] | None
    """None once it has failed: the next call requests them again."""


class ArrivingRows:
    """Requests rows from the servers and yields them, in the order of the steps that need them.

    Args:
        gathered_steps: one fetch gathers the rows of this many steps, unless a step needs them earlier.
    """

    def __init__(self, client: WeightClient, *, gathered_steps: int, counters: RowCounters) -> None:
        self._client = client
        self._gathered_steps = gathered_steps
        self._counters = counters
        self._wanted: list[tuple[Int64Array, Int64Array]] = []  # rows and slots still to be requested
        self._wanted_from = 0  # the first step that needs one of them
        self._fetches: deque[_Fetch] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def want(self, rows: Int64Array, slots: Int64Array, step: int) -> None:
        """Notes that `step` needs rows, int64 (n,), in slots, int64 (n,); `request_if_due` or `receive` fetch them."""
        if not self._wanted:
            self._wanted_from = step
        self._wanted.append((rows, slots))

    def request_if_due(self, step: int) -> None:
        """Starts a fetch if the rows of enough steps up to `step` were gathered."""
        if self._wanted and step - self._wanted_from >= self._gathered_steps:
            self._request()

    def receive(self, step: int) -> Iterator[tuple[Int64Array, RowState]]:
        """Waits for all rows that `step` needs; yields them by slots and raw state."""
        if self._wanted and self._wanted_from <= step:
            self._request()
        while self._fetches and self._fetches[0].first_step <= step:
            fetch = self._fetches[0]
            if fetch.state is None:
                fetch.state = self._submit(fetch.rows)
            with self._counters.waiting():
                try:
                    state = fetch.state.result()
                except Exception:  # also of a token's own
                    fetch.state = None
                    raise
            yield fetch.slots, state
            self._fetches.popleft()  # not before they were placed
            self._counters.fetched(len(fetch.slots), 2 * state.weight.size, len(state.last_step))
            self._counters.prefetch_pending_rows -= len(fetch.slots)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _request(self) -> None:
        """Starts one fetch of all wanted rows."""
        rows, slots = (np.concatenate(parts) for parts in zip(*self._wanted, strict=True))
        order = np.argsort(rows)
        self._fetches.append(_Fetch(self._wanted_from, rows[order], slots[order], self._submit(rows[order])))
        self._wanted = []
        self._counters.prefetch_pending_rows += len(rows)

    def _submit(self, rows: Int64Array) -> Future[RowState]:
        return self._thread.submit(self._client.fetch_state, rows)
