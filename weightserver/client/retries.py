"""Retries of a call: the budget, the pauses, and what is known about the attempts so far."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import grpc

from weightserver.client.calls import Call
from weightserver.protocol.status import error_fields

_RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,  # by a shard that stops; the client itself cancels nothing before it closes
)
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 1.0


class AnswerInDoubtError(Exception):
    """An answer whose mark cannot be ordered. The next attempt settles that, unless something is wrong with the shard:
    it changes nothing and brings a newer mark.
    """


@dataclass(frozen=True)
class Failure:
    """How an attempt failed."""

    status: grpc.StatusCode
    details: str
    cause: str
    """In the error after the last attempt."""
    is_retried: bool
    fields: dict[str, int] = field(default_factory=dict)
    """Of the error that the shard raised."""

    @classmethod
    def of(cls, error: grpc.RpcError | AnswerInDoubtError) -> Failure:
        if isinstance(error, AnswerInDoubtError):
            status, details = grpc.StatusCode.ABORTED, "its answers could not be ordered"
            return cls(status, details, f"{status.name}: {details}", is_retried=True)
        status = error.code()
        fields = error_fields(error.trailing_metadata())
        is_retried = status in _RETRIED or "num_used" in fields
        details = " ".join((error.details() or "").split())
        return cls(status, details, f"{status.name}: {details}", is_retried, fields)

    @property
    def is_silence(self) -> bool:
        """Whether the shard itself may have said nothing."""
        return self.status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

    @property
    def is_overload(self) -> bool:
        return self.status is grpc.StatusCode.RESOURCE_EXHAUSTED


class Retries:
    """The attempts of one call. The budget restarts when an attempt has received some of its rows."""

    def __init__(self, call: Call) -> None:
        self.waited = 0.0
        """Seconds that the budget has run, as of the last failure or pause."""
        self.in_doubt = False
        """Whether an attempt may have changed something although its answer is unknown."""
        self._started = call.started
        self._rows = call.rows
        self._num_arrived = call.rows.num_arrived if call.rows else 0
        self._pause_seconds = _FIRST_PAUSE_SECONDS

    def restart_if_rows_arrived(self) -> bool:
        """Restarts the budget if the last attempt received rows; the next attempt then follows at once."""
        if self._rows is None or self._rows.num_arrived == self._num_arrived:
            return False
        self._started, self._num_arrived = time.monotonic(), self._rows.num_arrived
        self._pause_seconds, self.waited = _FIRST_PAUSE_SECONDS, 0.0
        return True

    def note_failure(self, failure: Failure) -> None:
        self.in_doubt |= not (failure.is_overload or "num_used" in failure.fields)
        self.waited = time.monotonic() - self._started

    def pause(self, budget_seconds: float) -> None:
        """Waits before the next attempt."""
        remaining = budget_seconds - self.waited
        seconds = self._pause_seconds * random.uniform(0.5, 1.0)  # not all clients try again at the same time
        time.sleep(min(seconds, remaining))
        self.waited = time.monotonic() - self._started
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)

    @property
    def progress(self) -> str:
        """How far a fetch came, for an error message; empty for other calls."""
        return f", {self._rows.num_arrived} of {self._rows.num_rows} rows had arrived" if self._rows else ""
