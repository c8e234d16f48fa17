"""Every error that a caller can meet, and its gRPC status.

WeightServerError
├── ShardUnavailableError    UNAVAILABLE          a shard did not answer within the retry budget
├── OverloadedError          RESOURCE_EXHAUSTED   a shard or a limit is full; retried by the client
├── ClusterError             UNIMPLEMENTED        the addresses given do not make one complete cluster
├── NoTableError             NOT_FOUND            the shard holds no table yet, or no such checkpoint
├── TableMismatchError       ALREADY_EXISTS       the table that exists is another one
├── InvalidRequestError      INVALID_ARGUMENT     shape, dtype, row or value that cannot be
├── StepError                OUT_OF_RANGE         beyond the schedule, before what a row has seen, or where rows diverge
├── FencedError              ABORTED              the session was superseded, or none was opened
├── AuthenticationError      UNAUTHENTICATED      one side does not believe the other's token or certificate
├── StorageError             FAILED_PRECONDITION  the disk's contents are not what they must be
└── DataLossError            DATA_LOSS            the shard lacks what it had acknowledged

What a write did is unknown unless its error is a proven refusal, `not_applied`: made before a commit was tried, by the
only attempt whose outcome could be in doubt.

Shards raise these; `protocol/status.py` has the gRPC status of each, by which clients raise the same classes. Nothing
else crosses the wire: a foreign exception is logged by the shard and becomes INTERNAL with a fixed text.
"""

from __future__ import annotations


class WeightServerError(Exception):
    """Base of all errors of the weight server and its client."""

    not_applied: bool = False
    """Whether it proves that the call it ended changed nothing on the shard."""


class ShardUnavailableError(WeightServerError):
    """A shard did not answer within `retry_seconds`."""


class OverloadedError(WeightServerError):
    """A shard has no room for another request now; trying again later may succeed."""

    not_applied = True


class ClusterError(WeightServerError):
    """The addresses given do not make one complete cluster: a shard is missing, doubled or of another cluster."""

    not_applied = True


class NoTableError(WeightServerError):
    """The shard holds no table yet, or no checkpoint of that name."""

    not_applied = True


class TableMismatchError(WeightServerError):
    """The table that exists has another spec, or another schedule, than the one asked for."""

    not_applied = True


class InvalidRequestError(WeightServerError):
    """A shape, dtype, row or value that cannot be right."""

    not_applied = True


class StepError(WeightServerError):
    """A step beyond the schedule, before an update that the row has already seen, or behind one in which SGD makes it
    infinite or NaN."""

    not_applied = True


class FencedError(WeightServerError):
    """The writer's session was superseded by a newer one, or no session was opened."""

    not_applied = True


class AuthenticationError(WeightServerError):
    """A call without the shard's token, or a TLS certificate that one side does not take; trying again is no use."""

    not_applied = True


class StorageError(WeightServerError):
    """The data directory is not what it must be: another shard's, another format's, locked, or damaged."""


class DataLossError(WeightServerError):
    """The shard's data does not hold what was acknowledged: an older copy, or another directory, is in its place."""

    not_applied = True


class MapGrownError(StorageError):
    """LMDB's map was full. The transaction was undone; the same again finds a larger map."""
