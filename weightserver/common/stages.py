"""Measures how long each stage of a task takes; every moment belongs to exactly one stage."""

from __future__ import annotations

from collections import defaultdict
from contextvars import ContextVar
from time import perf_counter


class StageClock:
    """Sums the seconds spent in each stage since it was made; `stage` is the current one."""

    def __init__(self, stage: str) -> None:
        self._started = self._since = perf_counter()
        self.stage = stage
        self.num_rows = 0
        """Rows that the task is about, as far as they are known."""
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def start(self, stage: str) -> str:
        """Ends the current stage, and starts or continues another; returns the one that ended."""
        now, ended = perf_counter(), self.stage
        self.seconds[ended] += now - self._since
        self.stage, self._since = stage, now
        return ended

    def seconds_so_far(self) -> dict[str, float]:
        """The seconds of each stage, including the current one so far; may be called by any thread."""
        seconds, stage, since = self.seconds.copy(), self.stage, self._since
        return seconds | {stage: seconds.get(stage, 0.0) + perf_counter() - since}

    def elapsed_seconds(self) -> float:
        return perf_counter() - self._started


_clock: ContextVar[StageClock | None] = ContextVar("clock", default=None)
"""The clock of the current call, from its arrival on; gRPC finds and runs a call's handler in one context."""


def arrive() -> None:
    """Starts the clock of the current call, before it waits for a thread."""
    _clock.set(StageClock("queue"))


def call_clock() -> StageClock:
    """The clock of the current call; a new one, if its arrival was not recorded."""
    return _clock.get() or StageClock("queue")
