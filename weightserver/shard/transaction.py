"""One write transaction of a shard, and the header of a write in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weightserver.shard.schedule_change import ScheduleState
from weightserver.storage.interface import Transaction
from weightserver.storage.records import State


@dataclass(frozen=True)
class WriteHeader:
    """Identifies a write: the session, the writer, and its number; see the wire contract."""

    epoch: int
    opener: bytes
    writer: bytes
    sequence: int
    step: int
    schedule: int = 0
    """Digest of the learning rates that the writer knows; 0 is not checked."""


@dataclass
class WriteTransaction:
    """A write transaction under way. Operations replace `state` and `schedule`, which are stored before the commit."""

    txn: Transaction
    state: State
    mark: str
    """The shard's mark once this is committed."""
    schedule: ScheduleState
    after_commit: list[Callable[[], None]] = field(default_factory=list)
    is_cancelled: Callable[[], bool] = lambda: False
    """Whether the caller of the running operation has stopped waiting for it."""
