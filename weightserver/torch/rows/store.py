"""What the training loop calls of the row stores."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from weightserver.core.arrays import Int64Array


@dataclass
class RowCounters:
    """Counts what a store has done since it was created, and what it holds."""

    wait_seconds: float = 0.0
    """Time for which the training loop waited for rows."""
    fetched_rows: int = 0
    fetched_bytes: int = 0
    pushed_rows: int = 0
    """Rows whose gradients were pushed, or that were written back."""
    pushed_bytes: int = 0
    resident_rows: int = 0
    prefetch_pending_rows: int = 0
    write_back_pending_rows: int = 0
    value_bytes: int = 4
    """Bytes of a value on the wire."""
    corrected_rows: int = 0
    """Rows, once for each return, that became active again after steps without an update: in all stores but "remote",
    whose rows the servers correct."""
    missed_steps: int = 0
    """Sum of the steps that these rows had missed, their gaps."""
    largest_gap: int = 0

    _waits: tuple[float, float | None] = (0.0, None)
    """`wait_seconds` before the newest wait, and when that began, if it has not ended."""

    def fetched(self, num_rows: int, num_values: int, num_steps: int = 0) -> None:
        self.fetched_rows += num_rows
        self.fetched_bytes += self.value_bytes * num_values + 8 * num_steps

    def pushed(self, num_rows: int, num_values: int, num_steps: int = 0) -> None:
        self.pushed_rows += num_rows
        self.pushed_bytes += self.value_bytes * num_values + 8 * num_steps

    def corrected(self, gaps: Int64Array) -> None:
        self.corrected_rows += len(gaps)
        self.missed_steps += int(gaps.sum())
        self.largest_gap = max(self.largest_gap, int(gaps.max(initial=0)))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        self._waits = (self.wait_seconds, started)
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - started
            self._waits = (self.wait_seconds, None)

    def waited_seconds(self) -> float:
        """`wait_seconds`, with a wait that has not ended; may be called by any thread."""
        ended, since = self._waits
        return self.wait_seconds if since is None else ended + time.perf_counter() - since


class RowStore(ABC):
    """Holds rows of D values; each step uses some of them, strictly increasing int64 (K,).

    Each step calls `weights`, then `apply_gradients`; `prefetch` is called `prefetch_steps` steps earlier. The next
    call raises an error that occurred in the background.

    An update is made at one point of `apply_gradients`, where `num_updates` changes. An exception before it, an
    interrupt too, leaves the rows as they were; what one after it leaves undone, the next call does.
    """

    counters: RowCounters
    prefetch_steps = 0

    @property
    @abstractmethod
    def num_updates(self) -> int:
        """Number of the update after the last one that was made; at most that of the next step before the first."""

    def reserve(self, capacity: int) -> None:
        """Makes room for at least `capacity` rows, if the store has a capacity."""
        return

    def prefetch(self, rows: Int64Array, *, step: int) -> None:
        """Announces the rows that `weights` will return for `step`; returns immediately."""
        return

    def forget_announced(self, *, in_progress: bool) -> None:
        """Forgets the steps that were announced: other rows may be announced for them. If a step is `in_progress`,
        between `weights` and `apply_gradients`, that one is kept."""
        return

    @abstractmethod
    def weights(self, rows: Int64Array, *, step: int) -> Tensor:
        """The rows before update `step`: float32 (K, D)."""

    @abstractmethod
    def apply_gradients(self, rows: Int64Array, gradients: Tensor, *, step: int) -> None:
        """Applies update `step` with gradients float32 (K, D) to the rows that `weights` returned last; may return
        before it is done."""

    def flush(self) -> None:
        """Returns once every update so far is durable; dense rows are not stored."""
        return

    @abstractmethod
    def peek(self, rows: Int64Array, *, step: int) -> Tensor:
        """Any rows, int64 (n,), before update `step`, the next one: float32 (n, D), on the device. Changes nothing."""

    def close(self) -> None:
        """Ends the background threads; updates since the last flush may be lost."""
        return
