"""The protocol between the training loop and whoever holds the rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from weightserver import RowState
from weightserver.core.arrays import Int64Array


@dataclass
class RowCounters:
    """What a store did since it was made, and what it holds."""

    wait_seconds: float = 0.0
    """Time that the training loop waited for rows."""
    fetched_rows: int = 0
    fetched_bytes: int = 0
    pushed_rows: int = 0
    """Rows whose gradients were pushed, or which were written back."""
    pushed_bytes: int = 0
    resident_rows: int = 0
    prefetch_pending_rows: int = 0
    write_back_pending_rows: int = 0
    fetch_seconds: list[float] = field(default_factory=list)
    """Duration of each fetch since `take_fetch_seconds` was last called."""

    def fetched(self, num_rows: int, num_bytes: int) -> None:
        self.fetched_rows += num_rows
        self.fetched_bytes += num_bytes

    def pushed(self, num_rows: int, num_bytes: int) -> None:
        self.pushed_rows += num_rows
        self.pushed_bytes += num_bytes

    def take_fetch_seconds(self) -> list[float]:
        """Removes and returns the durations of the fetches so far."""
        taken = self.fetch_seconds[:]
        del self.fetch_seconds[: len(taken)]  # another thread may have added more
        return taken

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Around one fetch that succeeds; in any thread."""
        started = time.perf_counter()
        yield
        self.fetch_seconds.append(time.perf_counter() - started)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - started


class RowStore(Protocol):
    """Holds rows of D values; each step asks for some of them, strictly increasing int64 (K,).

    For each step in turn: `weights`, `apply_gradients`; `prefetch` runs `prefetch_steps` steps ahead of them. An error
    in the background is raised by the next call.
    """

    counters: RowCounters
    prefetch_steps: int

    def prefetch(self, rows: Int64Array, *, step: int) -> None:
        """Announces the rows that `weights` will be asked for; returns at once."""

    def weights(self, rows: Int64Array, *, step: int) -> Tensor:
        """The rows before update `step`: float32 (K, D)."""

    def apply_gradients(self, rows: Int64Array, gradients: Tensor, *, step: int) -> None:
        """Makes update `step` with gradients (K, D); may return before it is done."""

    def flush(self) -> None:
        """Returns once every update given so far is where the rows outlive the trainer."""

    def read_state(self, rows: Int64Array, *, step: int) -> RowState:
        """Any rows before update `step`, with their momentum, after all updates given so far."""

    def close(self) -> None:
        """Ends what runs in the background; what was not flushed may be lost."""
