"""The gRPC status of each error."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from weightserver.common.version import works_with
from weightserver.core.errors import (
    AuthenticationError,
    DataLossError,
    FencedError,
    InvalidRequestError,
    NoTableError,
    OverloadedError,
    SessionInUseError,
    ShardUnavailableError,
    StepError,
    StorageError,
    TableMismatchError,
    WeightServerError,
    WrongShardError,
)
from weightserver.protocol.codec import MARK_KEY, VERSION_KEY

ERROR_OF_STATUS: dict[grpc.StatusCode, type[WeightServerError]] = {
    grpc.StatusCode.INTERNAL: WeightServerError,
    grpc.StatusCode.UNAVAILABLE: ShardUnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNIMPLEMENTED: WrongShardError,
    grpc.StatusCode.NOT_FOUND: NoTableError,
    grpc.StatusCode.ALREADY_EXISTS: TableMismatchError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: StepError,
    grpc.StatusCode.ABORTED: FencedError,
    grpc.StatusCode.PERMISSION_DENIED: SessionInUseError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.FAILED_PRECONDITION: StorageError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
}
_OUTCOMES = {
    grpc.StatusCode.OK: "ok",
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.UNKNOWN: "failed",
    grpc.StatusCode.DEADLINE_EXCEEDED: "failed",
    grpc.StatusCode.INTERNAL: "failed",
    grpc.StatusCode.UNAVAILABLE: "failed",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "failed",
    grpc.StatusCode.FAILED_PRECONDITION: "failed",
    grpc.StatusCode.DATA_LOSS: "failed",
}
_STATES_REFUSE = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.ABORTED,
)
_STATUS_OF_ERROR = {error: status for status, error in ERROR_OF_STATUS.items()}


_FIELDS = ("row", "step", "num_used", "own_shard", "own_num_shards", "is_empty", "silent_seconds")
"""Fields of an error that travel with it, in the trailing metadata."""


def error_metadata(error: WeightServerError) -> tuple[tuple[str, str], ...]:
    """The metadata that tell a client the error's fields."""
    values = ((name, getattr(error, name, None)) for name in _FIELDS)
    return tuple((f"weightserver-error-{name}", str(value)) for name, value in values if value is not None)


def error_fields(metadata: Iterable[tuple[str, str]] | None) -> dict[str, int]:
    """The fields that `error_metadata` told; ignores what no shard sends."""
    found = dict(metadata or ())
    given = {name: found.get(f"weightserver-error-{name}", "") for name in _FIELDS}
    return {name: int(value) for name, value in given.items() if value.isascii() and value.isdigit()}


def outcome_of(status: grpc.StatusCode) -> str:
    """How a call with this status ends: ok, refused with an error that is its caller's, failed with one that is the
    service's, or cancelled, when its caller leaves.
    """
    return _OUTCOMES.get(status, "refused")


def mark_of(metadata: Iterable[tuple[str, str]] | None) -> str:
    """The shard's mark, with which its answers end; empty if there is none."""
    return dict(metadata or ()).get(MARK_KEY, "")


def mark_of_refusal(refused: grpc.RpcError) -> str:
    """The mark of a shard whose state, which descends from the caller's mark, refused a call; empty if the refusal may
    have another reason, as that of a caller of another version, or that of a disk."""
    return mark_of(refused.trailing_metadata()) if refused.code() in _STATES_REFUSE else ""


def is_of_shard(metadata: Iterable[tuple[str, str]] | None) -> bool:
    """Whether the trailing metadata of an answer are those of a shard, which all have a mark or a version."""
    return not {MARK_KEY, VERSION_KEY}.isdisjoint(dict(metadata or ()))


def refused_of_caller(status: grpc.StatusCode, metadata: Iterable[tuple[str, str]] | None) -> str:
    """What a shard has refused of its caller, before it looked at the call: "token", "version", or nothing."""
    if (version := dict(metadata or ()).get(VERSION_KEY)) is None:
        return ""
    if status is grpc.StatusCode.UNAUTHENTICATED:
        return "token"
    return "" if works_with(version) else "version"


def status_of(error: type[WeightServerError]) -> grpc.StatusCode:
    """The status of an error's class, or of its nearest base that has one."""
    return next(_STATUS_OF_ERROR[base] for base in error.__mro__ if base in _STATUS_OF_ERROR)
