"""Retries of a call: how an attempt failed, whether another one follows, and what the caller is told in the end."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import grpc

from weightserver.client.calls import Call
from weightserver.core.errors import (
    ClusterError,
    DataLossError,
    OverloadedError,
    ShardUnavailableError,
    StorageError,
    WeightServerError,
    WrongShardError,
)
from weightserver.protocol.status import ERROR_OF_STATUS, error_fields, is_of_shard, refused_of_caller, status_of

_RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,  # by a shard that stops; the client itself cancels nothing before it closes
)
ANSWERED = ("no table", *(f"another {what}" for what in ("table", "state", "token", "version", "program")))
"""What may answer in the place of a shard, besides another shard of its cluster."""
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 1.0


class AnswerInDoubtError(Exception):
    """An answer whose mark cannot be ordered. The next attempt settles that, unless something is wrong with the shard:
    it changes nothing and brings a newer mark.
    """


class AnswerOfAnotherError(AnswerInDoubtError):
    """An answer that no shard gives."""


@dataclass(frozen=True)
class Failure:
    """How an attempt failed."""

    status: grpc.StatusCode
    details: str
    is_retried: bool
    fields: dict[str, int] = field(default_factory=dict)
    """Fields of the error that the shard raised."""
    is_of_another: bool = False
    """Whether another shard or program has answered, which may be there for a while only."""
    refused: str = ""
    """What of this client a shard of its address refuses that took it before: its token or its version."""

    @classmethod
    def of(cls, error: grpc.RpcError | AnswerInDoubtError, *, has_answered: bool, mark_is_own: bool) -> Failure:
        """How an attempt failed by this error.

        Args:
            has_answered: whether the shard has ever answered this client.
            mark_is_own: whether the mark that was sent is one that the shard gave this client.
        """
        if isinstance(error, AnswerOfAnotherError):
            return cls(grpc.StatusCode.UNKNOWN, "its answer is none of a shard", is_retried=True, is_of_another=True)
        if isinstance(error, AnswerInDoubtError):
            return cls(grpc.StatusCode.ABORTED, "its answers could not be ordered", is_retried=True)
        status, trailer = error.code(), error.trailing_metadata()
        details, fields = " ".join((error.details() or "").split()), error_fields(trailer)
        refused = refused_of_caller(status, trailer) if has_answered else ""
        is_foreign = status is status_of(WrongShardError) or not (status in _RETRIED or is_of_shard(trailer))
        is_foreign |= status is status_of(DataLossError) and has_answered and mark_is_own  # it may be a restored copy
        is_of_another = is_foreign or bool(refused)
        is_retried = status in _RETRIED or "num_used" in fields or is_of_another
        return cls(status, details, is_retried, fields, is_of_another, refused)

    @property
    def is_silence(self) -> bool:
        """Whether the shard itself may have said nothing."""
        return self.status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

    @property
    def answered(self) -> str:
        """What has, if it is another one."""
        if self.refused:
            return f"another {self.refused}"
        if "own_shard" in self.fields:
            return f"{self.fields['own_shard']}/{self.fields.get('own_num_shards', 0)}"
        if self.status is status_of(DataLossError):
            return "another state"
        is_empty = self.fields.get("is_empty")
        return "another program" if is_empty is None else "no table" if is_empty else "another table"

    @property
    def is_overload(self) -> bool:
        return self.status is grpc.StatusCode.RESOURCE_EXHAUSTED


class Retries:
    """The attempts of one call. The budget restarts when an attempt has received some of its rows."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._started = call.started
        self._num_arrived = call.rows.num_arrived if call.rows else 0
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._in_doubt = False
        """Whether an attempt may have changed something although its answer is unknown."""

    @property
    def have_rows_arrived(self) -> bool:
        """Whether the last attempt has received some."""
        return self._call.rows is not None and self._call.rows.num_arrived > self._num_arrived

    def after(self, failure: Failure, *, has_answered: bool) -> None:
        """Waits before the next attempt, which follows at once if rows have arrived.

        Args:
            has_answered: whether the shard has ever answered this client.

        Raises:
            WeightServerError: no other attempt would help, or `budget_seconds` of the call have passed.
        """
        self._call.failed(failure.status)
        if failure.is_of_another:
            self._call.answered_by(failure.answered)
        if not failure.is_retried:
            raise self._told(self._refusal(failure))
        if self.have_rows_arrived and self._call.rows is not None:
            self._started, self._num_arrived = time.monotonic(), self._call.rows.num_arrived
            self._pause_seconds = _FIRST_PAUSE_SECONDS
            return
        self._in_doubt |= not (failure.is_overload or "num_used" in failure.fields)
        waited = time.monotonic() - self._started
        if waited >= self._call.budget_seconds:
            raise self._told(self._unanswered(failure, waited, has_answered=has_answered))
        seconds = self._pause_seconds * random.uniform(0.5, 1.0)  # not all clients try again at the same time
        time.sleep(min(seconds, self._call.budget_seconds - waited))
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _told(self, error: WeightServerError) -> WeightServerError:
        error.not_applied &= not self._in_doubt
        return error

    def _refusal(self, failure: Failure) -> WeightServerError:
        """The error of a failure that no retry would heal."""
        if failure.is_of_another and failure.status is not grpc.StatusCode.UNIMPLEMENTED:
            return ClusterError(
                f"{self._call.target} does not answer as a weight server does ({failure.status.name}: "
                f"{failure.details}): check where its name and address lead"
            )
        if failure.is_of_another:
            return ClusterError(
                f"{self._call.target} does not know this call: it runs an older version, or is no weight server: "
                "update it"
            )
        details = failure.details
        if failure.status in (status_of(WeightServerError), status_of(StorageError)):
            details += f" (its log tells more of request {self._call.request_id})"
        kind = ERROR_OF_STATUS.get(failure.status, WeightServerError)
        return kind(f"{self._call.target}: {details}", **failure.fields)

    def _unanswered(self, failure: Failure, waited: float, *, has_answered: bool) -> WeightServerError:
        """The error after the last attempt."""
        call, progress = self._call, ""
        if call.rows is not None:
            progress = f", {call.rows.num_arrived} of {call.rows.num_rows} rows had arrived"
        if failure.refused:
            return ERROR_OF_STATUS[failure.status](
                f"{call.target} has refused this client's {failure.refused} for {waited:.1f} s{progress}, which it had "
                f"taken before, or another one is at its address: {failure.details}"
            )
        if failure.is_of_another and not has_answered:
            return self._refusal(failure)
        if failure.is_overload:
            return OverloadedError(f"{call.target} was overloaded for {waited:.1f} s{progress}: {failure.details}")
        if failure.fields.get("is_empty"):
            return DataLossError(
                f"{call.target} lacked what it had acknowledged for {waited:.1f} s ({failure.details}){progress}: an "
                "empty directory is in its place: put the newest directory back, or take all shards to one checkpoint "
                "or backup (docs/operations.md)"
            )
        if failure.status is status_of(DataLossError):
            return DataLossError(f"{call.target}, for {waited:.1f} s{progress}: {failure.details}")
        if failure.is_of_another:
            return WrongShardError(
                f"{call.target} was not at its address for {waited:.1f} s, but another shard or program "
                f"({failure.details}){progress}: check where its name and address lead, then repeat the call"
            )
        check = "that it runs and can be reached, then repeat the call"
        if not has_answered:
            check = (
                "the address, that it runs, and the TLS options of both sides, or wait longer with --wait-for-servers "
                "(connect_seconds)"
            )
        return ShardUnavailableError(
            f"{call.target} did not answer for {waited:.1f} s ({failure.status.name}: {failure.details}){progress}: "
            f"check {check}",
            shard=call.target,
        )
