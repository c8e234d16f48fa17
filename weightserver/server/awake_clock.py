"""A clock that stands still while this process has no time: its own pauses are no silence of its callers."""

from __future__ import annotations

import math
import time

_SLACK_SECONDS = 0.25
"""By how much a look may be late without a pause of the process."""


class AwakeClock:
    """`time.monotonic` without the pauses of this process, as a thread that looks regularly notices them.

    A process without enough time pauses often; its clock is slower then, but never stops. Thread-safe, but for `look`.
    """

    def __init__(self) -> None:
        self._noted = 0.0, math.inf
        """Seconds of all pauses until the last look, and when the next one is due, on the clock of `time.monotonic`."""

    def now(self) -> float:
        """Seconds since an arbitrary time."""
        (paused, next_look), now = self._noted, time.monotonic()  # in this order: a pause may begin between the two
        return now - paused - _late(now, next_look)

    def look(self, seconds: float) -> None:
        """To be called by one thread, which calls it again in so many seconds."""
        (paused, next_look), now = self._noted, time.monotonic()
        self._noted = paused + _late(now, next_look), now + seconds  # both at once, for other threads


def _late(now: float, next_look: float) -> float:
    return max(0.0, now - next_look - _SLACK_SECONDS)
