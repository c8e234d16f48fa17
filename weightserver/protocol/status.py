"""The gRPC status of each error."""

from __future__ import annotations

import grpc

from weightserver.core.errors import (
    AuthenticationError,
    ClusterError,
    DataLossError,
    FencedError,
    InvalidRequestError,
    NoTableError,
    OverloadedError,
    ShardUnavailableError,
    StepError,
    StorageError,
    TableMismatchError,
    WeightServerError,
)

ERROR_OF_STATUS: dict[grpc.StatusCode, type[WeightServerError]] = {
    grpc.StatusCode.INTERNAL: WeightServerError,
    grpc.StatusCode.UNAVAILABLE: ShardUnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNIMPLEMENTED: ClusterError,
    grpc.StatusCode.NOT_FOUND: NoTableError,
    grpc.StatusCode.ALREADY_EXISTS: TableMismatchError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: StepError,
    grpc.StatusCode.ABORTED: FencedError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.FAILED_PRECONDITION: StorageError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
}
_STATUS_OF_ERROR = {error: status for status, error in ERROR_OF_STATUS.items()}


def status_of(error: type[WeightServerError]) -> grpc.StatusCode:
    """The status of an error's class, or of its nearest base that has one."""
    return next(_STATUS_OF_ERROR[base] for base in error.__mro__ if base in _STATUS_OF_ERROR)
