"""The errors of the weight server and its client, and their gRPC statuses.

WeightServerError
├── ShardUnavailableError    UNAVAILABLE          a shard did not answer within the retry budget
├── OverloadedError          RESOURCE_EXHAUSTED   a shard or a limit is full; retried by the client
├── WrongShardError          UNIMPLEMENTED        another shard or program answers at the address; retried by the client
├── ClusterError                                  the addresses given do not make one complete cluster
├── NoTableError             NOT_FOUND            the shard holds no table yet, or no such checkpoint
├── TableMismatchError       ALREADY_EXISTS       another table exists
├── InvalidRequestError      INVALID_ARGUMENT     an invalid shape, dtype, row or value
├── StepError                OUT_OF_RANGE         beyond the schedule, before an update a row has seen, or rows diverge
│   └── MissingRatesError                         retried with the learning rates that the shard lacks
├── FencedError              ABORTED              the session was superseded, or none was opened
├── SessionInUseError        PERMISSION_DENIED    a live run holds the session
├── AuthenticationError      UNAUTHENTICATED      the call's token is missing or not the shard's
├── StorageError             FAILED_PRECONDITION  the data directory is damaged or another one
└── DataLossError            DATA_LOSS            the shard lacks what it had acknowledged

The outcome of a write that raised is unknown, unless the error is a proven refusal, `not_applied`: raised before a
commit was tried, by the only attempt whose outcome could be in doubt.

Shards raise these errors; `protocol/status.py` maps each to a gRPC status, from which clients raise the same class. No
other error crosses the wire: the shard logs a foreign exception and answers INTERNAL with a fixed text.
"""

from __future__ import annotations


class WeightServerError(Exception):
    """Base of all errors of the weight server and its client. Its fields arrive at the client with it."""

    not_applied: bool = False
    """Whether the error proves that its call changed nothing on the shard."""

    def __init_subclass__(cls, *, not_applied: bool | None = None) -> None:
        super().__init_subclass__()
        if not_applied is not None:
            cls.not_applied = not_applied

    def __init__(self, message: str = "", *, row: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.row = row
        """The row that is concerned, if it is one."""
        self.step = step
        """The step that was asked for, if it is wrong."""


class RowError(ValueError):
    """An argument that is wrong for the row `row`; nothing was sent."""

    def __init__(self, message: str, *, row: int) -> None:
        super().__init__(message)
        self.row = row


class ArgumentError(ValueError):
    """An argument that is wrong: `argument` names it, and `problem` follows its name in the message."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(argument, problem)
        self.argument, self.problem = argument, problem

    def __str__(self) -> str:
        return f"{self.argument} {self.problem}"


class ShardUnavailableError(WeightServerError):
    """A shard did not answer within `retry_seconds`; within `connect_seconds` if it has never answered this client."""

    def __init__(self, message: str = "", *, shard: str = "") -> None:
        super().__init__(message)
        self.shard = shard
        """Number and address of the shard."""


class OverloadedError(WeightServerError, not_applied=True):
    """A shard has no room for another request now; trying again later may succeed."""


class WrongShardError(WeightServerError):
    """Another shard or program answers at the address of one that has answered before. It applied nothing, but a copy
    of the request may still reach the right one."""

    def __init__(
        self,
        message: str = "",
        *,
        own_shard: int | None = None,
        own_num_shards: int | None = None,
        is_empty: int | None = None,
    ) -> None:
        super().__init__(message)
        self.own_shard, self.own_num_shards = own_shard, own_num_shards
        """The one that answers, and of how many, if its number is the wrong one."""
        self.is_empty = is_empty
        """Where the right number answers: 1 from a directory without a table, 0 from one with another table."""


class ClusterError(WeightServerError, not_applied=True):
    """The addresses do not make one complete cluster: a shard is missing, given twice, or of another cluster."""


class NoTableError(WeightServerError, not_applied=True):
    """The shard holds no table yet, or no checkpoint of that name."""


class TableMismatchError(WeightServerError, not_applied=True):
    """The existing table has another spec or schedule than the request."""


class InvalidRequestError(WeightServerError, not_applied=True):
    """An invalid shape, dtype, row or value."""


class StepError(WeightServerError, not_applied=True):
    """A step beyond the schedule, before an update that the row has already seen or a checkpoint's rows may have, or
    after one in which SGD makes the row infinite or NaN."""


class MissingRatesError(StepError):
    """The shard does not have the learning rates by which a request names its first ones; the client sends them."""

    def __init__(self, num_used: int) -> None:
        super().__init__(
            f"the shard does not have the learning rates that the request names by their digest, it has {num_used}: "
            "send those that follow"
        )
        self.num_used = num_used
        """Number of learning rates that the shard has stored."""


class FencedError(WeightServerError, not_applied=True):
    """The writer's session was superseded by a newer one, or no session was opened."""


class SessionInUseError(WeightServerError, not_applied=True):
    """A run that is alive holds the newest session; another one may take it over."""

    def __init__(self, message: str = "", *, silent_seconds: int = 0) -> None:
        super().__init__(message)
        self.silent_seconds = silent_seconds
        """How long the run has said nothing; one that lives says something each second."""


class AuthenticationError(WeightServerError, not_applied=True):
    """A call without the shard's token; retries do not help."""


class StorageError(WeightServerError):
    """The data directory cannot be used: it is another shard's, of another format, locked, or damaged."""


class DataLossError(WeightServerError):
    """The shard's data lacks acknowledged writes: an older copy, or another directory, is in its place. It
    applied nothing, but a copy of the request may still reach the shard's own directory."""


class DamagedBlockError(StorageError):
    """The bytes of one stored block changed on the disk, or are lost. All other blocks can be used."""


class DamagedFileError(StorageError):
    """The pages, records or index of a data file are damaged: it takes no more writes.

    Args:
        problems: what is wrong, one line each.
    """

    def __init__(self, message: str, problems: list[str]) -> None:
        super().__init__(message)
        self.problems = problems
