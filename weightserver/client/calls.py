"""The calls of shards that this process waits for: what they count while they happen, and which shards do not answer.

An attempt counts when it begins, a failure when it is received, and a call that takes too long before it ends. One
thread looks at the calls of all clients. It starts with the first call, and lives as long as the process.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from _thread import start_new_thread
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from weightserver.client import metrics
from weightserver.common.logs import OncePerSecond, new_request_id
from weightserver.common.metrics import LATE_SECONDS, Number, size_class
from weightserver.common.tracing import CLIENT, spans
from weightserver.core.errors import WeightServerError, WrongShardError
from weightserver.protocol.status import outcome_of, status_of

if TYPE_CHECKING:
    from weightserver.client.fetched_rows import FetchedRows

SILENT_SECONDS = 2.5
"""A shard that has sent nothing for so long although a call waits for it is reported."""
FAILED_SECONDS = 60.0
"""A call of which a shard has said nothing for so long counts as failed, once, although it may yet succeed: more than a
restart takes, and less than callers wait. Alerts cannot wait until a trainer gives up, and ends with its metrics."""
SLOW_SECONDS = 1.0
"""A call whose first attempt takes longer is logged, as it is by the shard."""
_REMINDER_SECONDS = 60.0
_TICK_SECONDS = 0.25
_STATUSES_OF_FAILURES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    status_of(WrongShardError),
)
"""Statuses after which a call is repeated. Their series exist from the first call on, so that the first repetition is
an increase."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Call:
    """One call of a shard: all of its attempts."""

    shard: str
    """Number of the shard; "unknown" until it has said that."""
    target: str
    """Number and address of the shard, for people."""
    expected: str
    """Number of the shard and of all; empty until they are known."""
    method: str
    num_rows: int = 0
    """Rows that it names; 0 for calls without rows."""
    rows: FetchedRows | None = None
    """The rows of a fetch, as they arrive."""
    request_id: str = field(default_factory=new_request_id)
    started: float = field(default_factory=lambda: time.monotonic())
    heard: float = 0.0
    """When the watch last saw that rows had arrived; `started` before."""
    num_arrived: int = 0
    num_attempts: int = 0
    failure: str = ""
    """The status of the last attempt that failed."""
    budget_seconds: float = 0.0
    """How long the call is tried, as of that failure."""
    counted: list[Number] = field(default_factory=list)
    """The counters that have it: of late calls, of failed ones."""
    outcome: str = "ok"
    """How it ended."""

    def __post_init__(self) -> None:
        self.size_class = size_class(self.num_rows)

    @property
    def labels(self) -> tuple[str, str]:
        return self.shard, self.method

    def attempted(self) -> None:
        metrics.attempts(*self.labels).inc()
        metrics.retries(*self.labels).inc(self.num_attempts > 0)
        self.num_attempts += 1

    def failed(self, status: grpc.StatusCode) -> None:
        self.failure = status.name
        metrics.errors(*self.labels, status.name, outcome_of(status)).inc()

    def gave_up(self, error: BaseException) -> None:
        """Notes the error that ends the call; any but a shard's means that the caller left or closed the client."""
        if isinstance(error, WrongShardError):
            self.outcome = "failed"
        elif isinstance(error, WeightServerError):
            self.outcome = outcome_of(status_of(type(error)))
        else:
            self.outcome = "cancelled"

    def answered_by(self, other: str) -> None:
        metrics.wrong_answers(self.shard, self.expected, other).inc()


class CallWatch:
    """The calls that threads wait for. Thread-safe."""

    def __init__(self) -> None:
        self.waiting: dict[Call, None] = {}
        self._known: set[tuple[str, str]] = set()
        self._silences: dict[str, tuple[float, float, Call]] = {}
        """Shards that do not answer: since when, when that was logged last, and a call."""
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._may_log = OncePerSecond()

    def began(self, call: Call) -> None:
        """A thread begins to wait for the answer."""
        call.heard = call.started
        labels = call.labels
        with self._lock:
            is_first, is_new = not self._known, labels not in self._known
            self.waiting[call] = None
            self._known.add(labels)
        if is_new:
            metrics.late(*labels)  # so that the first one is an increase
            metrics.failed(*labels)
            for status in _STATUSES_OF_FAILURES:
                metrics.errors(*labels, status.name, outcome_of(status))
            # not of `call`, which has the arrays of its caller
            metrics.waiting(*labels).set_function(lambda: float(len(self._ages(labels))))
            metrics.oldest(*labels).set_function(lambda: max(self._ages(labels), default=0.0))
        if is_first:
            start_new_thread(self._watch, ())  # not Thread.start: see threads.py

    def ended(self, call: Call) -> None:
        """No thread waits for the call any more."""
        seconds = time.monotonic() - call.started
        self._count(call, seconds, has_failed=call.outcome == "failed")
        metrics.call_seconds(*call.labels, call.size_class, call.outcome).observe(seconds)
        if traced := spans(CLIENT):
            values: dict[str, int | str] = {"shard": call.shard, "rows": call.num_rows, "attempts": call.num_attempts}
            traced.call_ended(call.request_id, call.method, seconds, call.outcome, values)
        if seconds >= SLOW_SECONDS and call.num_attempts == 1 and self._may_log(call.labels):
            _log.warning(
                "slow call: %(target)s took %(seconds).1f s for %(method)s of %(rows)d rows (%(outcome)s, %(request)s)",
                {
                    "shard": call.shard,
                    "target": call.target,
                    "method": call.method,
                    "seconds": round(seconds, 3),
                    "rows": call.num_rows,
                    "outcome": call.outcome,
                    "request": call.request_id,
                },
            )

    def leave(self, rows: list[FetchedRows]) -> None:
        """The caller of these fetches does not wait any more, whether they have ended or not."""
        for call in [call for call in list(self.waiting) if call.rows in rows]:
            call.outcome = "cancelled"
            self.waiting.pop(call, None)

    def _ages(self, labels: tuple[str, str]) -> list[float]:
        now = time.monotonic()
        return [now - call.started for call in list(self.waiting) if call.labels == labels]

    def _count(self, call: Call, seconds: float, *, has_failed: bool) -> None:
        """Counts a call as late, if it has taken so long, and as failed: once each, whichever thread notices first."""
        for counter, counts in (
            (metrics.late(*call.labels), seconds > LATE_SECONDS[call.size_class]),
            (metrics.failed(*call.labels), has_failed),
        ):
            with self._lock:
                if counts and counter not in call.counted:
                    call.counted.append(counter)
                    counter.inc()

    def _watch(self) -> None:
        while True:
            time.sleep(_TICK_SECONDS)
            self.look()

    def look(self) -> None:
        """Counts late and unanswered calls, and logs which shards have become silent, remain so, or answer again."""
        with self._looking:
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        silent: dict[str, Call] = {}
        for call in sorted(self.waiting, key=lambda call: call.heard):
            if call.rows is not None and call.rows.num_arrived != call.num_arrived:
                call.heard, call.num_arrived = now, call.rows.num_arrived
            self._count(call, now - call.started, has_failed=now - call.heard >= FAILED_SECONDS)
            if now - call.heard >= SILENT_SECONDS:
                silent.setdefault(call.target, call)
        for target, call in silent.items():
            since, reported, _ = self._silences.get(target, (call.heard, -math.inf, call))
            if now - reported >= _REMINDER_SECONDS:
                self._report(call, now - since)
                reported = now
            self._silences[target] = since, reported, call
        for target in self._silences.keys() - silent.keys():
            since, _, call = self._silences.pop(target)
            outcome = "it answers again" if call.outcome == "ok" else "calls were given up"
            _log.warning(
                "%(target)s did not answer for %(seconds).1f s: %(outcome)s",
                {"shard": call.shard, "target": target, "seconds": round(now - since, 1), "outcome": outcome},
            )

    def _report(self, call: Call, seconds: float) -> None:
        _log.warning(
            "%(target)s has not answered %(method)s for %(seconds).1f s (%(status)s): %(waiting)d waiting, "
            "%(attempts)d attempts of %(request)s, tried for %(budget)s",
            {
                "shard": call.shard,
                "target": call.target,
                "method": call.method,
                "seconds": round(seconds, 1),
                "status": call.failure or "no answer yet",
                "waiting": sum(other.target == call.target for other in list(self.waiting)),
                "attempts": call.num_attempts,
                "budget": f"{call.budget_seconds:.0f} s",
                "request": call.request_id,
            },
        )


WATCH = CallWatch()
os.register_at_fork(after_in_child=lambda: WATCH.__init__())  # type: ignore[misc]
