"""Lanes: how many calls of each kind are in progress at a time, and which of the waiting calls comes next.

Each kind of call has a lane with a number of places, so that callers of one kind do not keep out others. A few more
calls may wait for a place, in a thread each; nothing of them is received yet.

A lane is fair: a free place goes to the call that has tried for the longest time. Clients report for how long they have
tried (`WAITED_KEY`), so a call that was refused, or whose deadline passed while it waited, keeps its turn before later
calls. When too many calls want to wait, the one that has tried for the shortest time is refused, and told when to try
again: about when its turn comes, and one after another, at the pace at which places become free. If it is late, it is
the next. So clients that call equally often are served equally often, however many they are and however short their
calls.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import grpc

from weightserver.core.errors import OverloadedError
from weightserver.protocol.codec import WAITED_KEY

LANES = {"Fetch": 24, "write": 16, "control": 16, "health": 16, "watch": 64}
"""Calls at a time. A health watch takes no thread once its message has arrived; until then it is in "health"."""
MAX_CALLS = sum(calls for lane, calls in LANES.items() if lane != "watch")
"""Calls at a time that are being received, executed or answered."""
MAX_WAITING = {"Fetch": 64, "write": 64, "control": 64, "health": 0, "watch": 0}
"""Calls that may wait for a place. Health checks need no token, so none of them may occupy a thread by waiting."""
RETRY_AFTER_MS = 100
"""Time within which the calls of a lane are expected to end; no more is expected of them."""
_SHORTEST_RETRY_MS, _LONGEST_RETRY_MS = 5, 1000
_EARLY = 0.6
"""How much of the expected time a refused call is told to wait: clients add up to a half at random."""
_SMOOTHING = 0.1
"""Weight of the newest interval in the mean."""
_LANE_OF_METHOD = {
    "Fetch": "Fetch",
    "PushGradients": "write",
    "WriteState": "write",
    "Check": "health",
    "List": "health",
    "Watch": "watch",
}
_LONGEST_WAIT_SECONDS = 86_400.0


def lane_of(method: str) -> str:
    """The lane of a method, given as "/package.Service/Method"."""
    return _LANE_OF_METHOD.get(method.rpartition("/")[2], "control")


class LaneFullError(OverloadedError):
    """The lane has no free place, and too many calls wait for one."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


@dataclass(order=True)
class Turn:
    """A call that waits for a place; `place` ends with None once it has one, or with the error that refuses it."""

    since: float
    """When its caller first tried, on the clock of `time.monotonic`."""
    place: Future[None] = field(default_factory=Future, compare=False)


class Lane:
    """The places for calls of one kind, and the calls that wait for one. Thread-safe.

    Args:
        on_refused: called with the lane's name for each refused call.
    """

    def __init__(self, name: str, on_refused: Callable[[str], None]) -> None:
        self.name = name
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._num_free = LANES[name]
        self._waiting: list[Turn] = []  # empty while a place is free; ordered by first attempt
        self._seconds_per_place = 0.0  # mean time from one place that becomes free to the next, while all are taken
        self._full_since = 0.0  # when the last place became free, or the lane became full
        self._next_return = 0.0  # when the call that was refused last should try again

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, context: grpc.ServicerContext) -> None:
        """Takes a place, and waits for one if none is free.

        Raises:
            OverloadedError: too many calls wait that have tried for longer.
            CancelledError: the caller is gone.
        """
        turn = self.line_up(context)
        if turn is None:
            return
        if not context.add_callback(lambda: self._give_up(turn)):  # called too when the deadline passes
            self._give_up(turn)
        turn.place.result()

    def line_up(self, context: grpc.ServicerContext) -> Turn | None:
        """Takes a free place and returns None, or else a turn among the waiting calls, which may already be refused."""
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                if not self._num_free:
                    self._full_since = time.monotonic()
                return None
            now = time.monotonic()
            turn = Turn(now - _waited_seconds(context))
            bisect.insort(self._waiting, turn)
            refused = self._waiting.pop() if len(self._waiting) > MAX_WAITING[self.name] else None
            retry_after_ms = 0 if refused is None else self._retry_after_ms(now)
        if refused is not None:
            self._refuse(refused, retry_after_ms)
        return turn

    def leave(self) -> None:
        """Hands the place to the call that has waited longest, or frees it."""
        with self._lock:
            if self._waiting:
                now = time.monotonic()
                seconds = min(now - self._full_since, RETRY_AFTER_MS / 1000)
                self._seconds_per_place += _SMOOTHING * (seconds - self._seconds_per_place)
                self._full_since = now
                self._waiting.pop(0).place.set_result(None)
            else:
                self._num_free += 1

    def _give_up(self, turn: Turn) -> None:
        with self._lock:
            if any(other is turn for other in self._waiting):
                self._waiting = [other for other in self._waiting if other is not turn]
                turn.place.cancel()

    def _retry_after_ms(self, now: float) -> int:
        """When the next refused call should try again: when its turn is expected, or later if calls hang, and after the
        call that was refused before it.
        """
        places, waiting = LANES[self.name], len(self._waiting)
        most = RETRY_AFTER_MS / 1000 * (1 + waiting / places)
        turn = min(self._seconds_per_place * (places + waiting), most)
        hanging = min(now - self._full_since, most)
        pace = self._next_return + _EARLY * self._seconds_per_place
        self._next_return = min(max(pace, now + max(_EARLY * turn, hanging)), now + _LONGEST_RETRY_MS / 1000)
        return max(round(1000 * (self._next_return - now)), _SHORTEST_RETRY_MS)

    def _refuse(self, turn: Turn, retry_after_ms: int) -> None:
        places, waiting = LANES[self.name], len(self._waiting)
        self._on_refused(self.name)
        turn.place.set_exception(
            LaneFullError(
                f"the shard is busy with {places} {self.name} calls, and {waiting} wait: try again",
                retry_after_ms=retry_after_ms,
            )
        )


def _waited_seconds(context: grpc.ServicerContext) -> float:
    """For how long the caller reports to have tried; 0 if it reports nothing."""
    for key, value in context.invocation_metadata():
        if key == WAITED_KEY and value.isascii() and value.isdigit():
            return min(int(value[:12]) / 1000, _LONGEST_WAIT_SECONDS)
    return 0.0
