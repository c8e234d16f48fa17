"""Measures how long each stage of a task takes; every moment belongs to exactly one stage."""

from __future__ import annotations

import time
from contextvars import ContextVar

_arrived: ContextVar[float | None] = ContextVar("arrived", default=None)
"""When the current call arrived; gRPC runs a call's interceptors and handler in one context."""


def arrive() -> None:
    """Records the arrival of the current call, before it waits for a thread."""
    _arrived.set(time.perf_counter())


def arrived() -> float:
    """When the current call arrived, on the clock of `time.perf_counter`; now, if that was not recorded."""
    return _arrived.get() or time.perf_counter()


class StageClock:
    """Sums the seconds spent in each stage since `started`."""

    def __init__(self, stage: str, started: float | None = None) -> None:
        self._started = self._since = time.perf_counter() if started is None else started
        self._stage = stage
        self.seconds: dict[str, float] = {}

    def start(self, stage: str) -> None:
        """Ends the current stage, and starts or continues another."""
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def elapsed_seconds(self) -> float:
        return time.perf_counter() - self._started
