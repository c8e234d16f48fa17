"""A client's calls of shards while they happen: what they count, how long they take, and which shards do not answer.

Everything counts from the moment at which it happens: an attempt when it begins, a failure when it is received, and a
call that takes too long as soon as it does. `client.metrics` shows it to Prometheus, for all clients of the process.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from _thread import start_new_thread
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightserver.common.logs import new_request_id
from weightserver.common.series import Series

if TYPE_CHECKING:
    from weightserver.client.fetched_rows import FetchedRows

LATE_SECONDS = 0.1
"""A call that takes longer is late: the objective of the alert FetchSlow."""
SILENT_SECONDS = 2.5
"""A shard that has sent nothing for so long although a call waits for it is reported."""
_REMINDER_SECONDS = 60.0
_TICK_SECONDS = 0.5
_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG_BOUNDS = (60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_ROW_CLASSES = (128, 2048, 32_768)

_log = logging.getLogger(__name__)


def row_class(num_rows: int) -> str:
    """The size class of a call: the largest number of rows of its class; "more" beyond them."""
    return next((str(most) for most in _ROW_CLASSES if num_rows <= most), "more")


def bounds_up_to(longest_seconds: float) -> tuple[float, ...]:
    """Upper bounds of buckets for times up to `longest_seconds`, and an infinite one."""
    below = [bound for bound in (*_BOUNDS, *_LONG_BOUNDS) if bound < longest_seconds]
    return (*below, longest_seconds, math.inf)


@dataclass(eq=False)
class Call:
    """One call of a shard: all of its attempts."""

    shard: str
    """Number of the shard, or its address until that is known."""
    target: str
    """Number and address of the shard, for people."""
    method: str
    num_rows: int = 0
    """Rows that it names; 0 for calls without rows."""
    rows: FetchedRows | None = None
    """Those of a fetch, as they arrive."""
    request_id: str = field(default_factory=new_request_id)
    started: float = field(default_factory=lambda: time.monotonic())
    waited_since: float = 0.0
    """When a thread began to wait for the answer."""
    heard: float = 0.0
    """When the watch last saw that rows had arrived; `waited_since` before."""
    num_arrived: int = 0
    num_attempts: int = 0
    failure: str = ""
    """The status of the last attempt that failed."""
    gave_up: bool = False
    has_ended: bool = False

    @property
    def labels(self) -> tuple[str, str]:
        return self.shard, self.method

    def seconds(self, now: float) -> float:
        """How long it has taken. The answer of a fetch that was sent before its turn may have been there: then no
        longer than the shard says, and the thread waited."""
        seconds = now - self.started
        if self.rows is None or self.rows.shard_seconds is None:
            return seconds
        return min(seconds, self.rows.shard_seconds + now - self.waited_since)

    def silent_seconds(self, now: float) -> float:
        """For how long nothing has arrived; notices what has arrived since the last time."""
        if self.rows is not None and self.rows.num_arrived != self.num_arrived:
            self.heard, self.num_arrived = now, self.rows.num_arrived
        return now - self.heard


class CallStatistics:
    """What the calls of all clients of this process add up to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.attempts: Counter[tuple[str, str]] = Counter()
        """(shard, method) to number, as the following ones."""
        self.retries: Counter[tuple[str, str]] = Counter()
        self.late: Counter[tuple[str, str]] = Counter()
        """Calls that took over LATE_SECONDS and have ended."""
        self.errors: Counter[tuple[str, str, str]] = Counter()
        """(shard, method, status) to number of attempts."""
        self.seconds: dict[tuple[str, str, str], Series] = {}
        """(shard, method, row class) to durations of calls that have ended, whatever their outcome."""
        self.fetch_seconds: dict[tuple[str], Series] = {}
        """(row class) to durations of fetches from all shards together."""
        self.slowest_shard_seconds: dict[tuple[str], Series] = {}
        """(row class) to the time that the slowest shard of each of these fetches says it took."""
        self.watches: weakref.WeakSet[CallWatch] = weakref.WeakSet()

    def attempted(self, call: Call) -> None:
        with self._lock:
            self.attempts[call.labels] += 1
            self.retries[call.labels] += call.num_attempts > 0
        call.num_attempts += 1

    def failed(self, call: Call, status: str) -> None:
        with self._lock:
            self.errors[*call.labels, status] += 1

    def ended(self, call: Call, seconds: float, bounds: tuple[float, ...]) -> None:
        key = (*call.labels, row_class(call.num_rows) if call.num_rows else "")
        with self._lock:
            call.has_ended = True
            self.late[call.labels] += seconds > LATE_SECONDS
            series = self.seconds.setdefault(key, Series(bounds))
        series.observe(seconds)

    def fetched(self, num_rows: int, seconds: float, slowest: float | None, bounds: tuple[float, ...]) -> None:
        """Counts a fetch from all shards; `slowest` is None if a shard does not say how long it took."""
        key = (row_class(num_rows),)
        with self._lock:
            whole = self.fetch_seconds.setdefault(key, Series(bounds))
            shards = self.slowest_shard_seconds.setdefault(key, Series(bounds))
        whole.observe(seconds)
        if slowest is not None:
            shards.observe(slowest)

    def now(self) -> tuple[Counter[tuple[str, str]], dict[tuple[str, str], list[float]]]:
        """Per shard and method, the number of late calls so far, those that still wait included, and the seconds for
        which each call has been waited for."""
        waiting = [call for watch in list(self.watches) for call in watch.waiting()]
        with self._lock:  # a call is in exactly one of both
            late, now = self.late.copy(), time.monotonic()
            waiting = [call for call in waiting if not call.has_ended]
        ages: dict[tuple[str, str], list[float]] = {key: [] for key in list(self.attempts)}
        for call in waiting:
            age = now - call.waited_since
            ages.setdefault(call.labels, []).append(age)
            late[call.labels] += age > LATE_SECONDS
        return late, ages


STATISTICS = CallStatistics()
"""Those of this process."""


@dataclass
class _Silence:
    """A time in which a shard does not answer."""

    since: float
    reported: float
    call: Call


class CallWatch:
    """The calls of one client that threads wait for. Its own thread logs which shards do not answer.

    The thread starts with the first call, and ends after `end`.

    Args:
        retry_seconds: for how long calls are retried.
    """

    def __init__(self, retry_seconds: float) -> None:
        self.retry_seconds = retry_seconds
        self.bounds = bounds_up_to(max(retry_seconds, _BOUNDS[0]))
        self._waiting: dict[Call, None] = {}
        self._silences: dict[str, _Silence] = {}
        self._lock = threading.Lock()
        self._has_started = False
        self._running = threading.Lock()  # not an Event: `end` runs in the main thread, see threads.py
        self._running.acquire()
        self._watching = threading.Lock()
        """Held until the thread has ended."""
        STATISTICS.watches.add(self)

    def waiting(self) -> list[Call]:
        return list(self._waiting)

    def began(self, call: Call) -> None:
        """A thread begins to wait for the answer."""
        call.waited_since = call.heard = time.monotonic()
        with self._lock:
            self._waiting[call] = None
            is_first, self._has_started = not self._has_started, True
        if is_first:
            self._watching.acquire()
            start_new_thread(
                _watch, (weakref.ref(self), self._running, self._watching)
            )  # not Thread.start: see threads.py

    def ended(self, call: Call) -> None:
        """No thread waits for the call any more."""
        STATISTICS.ended(call, call.seconds(time.monotonic()), self.bounds)
        with self._lock:
            self._waiting.pop(call, None)

    def end(self) -> None:
        """Lets the thread end. Safe to repeat."""
        if self._running.locked():
            self._running.release()

    def wait(self) -> None:
        """Returns when the thread has ended: its last line may be that a shard answers again."""
        if self._watching.acquire(timeout=_TICK_SECONDS):
            self._watching.release()

    def look(self) -> None:
        """Logs which shards have become silent, remain so, or answer again."""
        now = time.monotonic()
        silent: dict[str, Call] = {}
        for call in sorted(self.waiting(), key=lambda call: -call.silent_seconds(now)):
            if call.silent_seconds(now) >= SILENT_SECONDS:
                silent.setdefault(call.shard, call)
        for shard, call in silent.items():
            silence = self._silences.get(shard)
            if silence is None:
                silence = self._silences[shard] = _Silence(call.heard, -math.inf, call)
            silence.call = call
            if now - silence.reported >= _REMINDER_SECONDS:
                silence.reported = now
                self._report(silence, now)
        for shard in self._silences.keys() - silent.keys():
            silence = self._silences.pop(shard)
            outcome = "calls were given up" if silence.call.gave_up else "it answers again"
            _log.warning(
                "%(target)s did not answer for %(seconds).1f s: %(outcome)s",
                {
                    "shard": shard,
                    "target": silence.call.target,
                    "seconds": round(now - silence.since, 1),
                    "outcome": outcome,
                },
            )

    def _report(self, silence: _Silence, now: float) -> None:
        call = silence.call
        _log.warning(
            "%(target)s has not answered %(method)s for %(seconds).1f s (%(status)s): %(waiting)d waiting, "
            "%(attempts)d attempts of %(request)s, retrying for %(retry_seconds).0f s",
            {
                "shard": call.shard,
                "target": call.target,
                "method": call.method,
                "seconds": round(now - silence.since, 1),
                "status": call.failure or "no answer yet",
                "waiting": sum(other.shard == call.shard for other in self.waiting()),
                "attempts": call.num_attempts,
                "retry_seconds": self.retry_seconds,
                "request": call.request_id,
            },
        )


def _watch(reference: weakref.ref[CallWatch], running: threading.Lock, watching: threading.Lock) -> None:
    ended, watch = False, reference()
    while not ended and watch is not None:
        del watch
        ended = running.acquire(timeout=_TICK_SECONDS)
        if (watch := reference()) is not None:
            watch.look()
    watching.release()
