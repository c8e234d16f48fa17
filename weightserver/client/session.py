"""A session of a client: the sequence numbers of its writer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from typing import TypeVar

from weightserver.core.errors import ClusterError, InvalidRequestError
from weightserver.core.exactly_once import WINDOW
from weightserver.protocol._generated import weight_server_pb2 as pb

MAX_FAILED = 64
"""Number of failed writes that can be repeated. Beyond it the oldest is given up, as is any that lies WINDOW writes
back, because the shard could record no further write. Repeating a write that was given up is refused."""

Result = TypeVar("Result")
Numbers = dict[int, int]
"""shard -> sequence number of one write."""


@dataclass
class Write:
    """A write under way."""

    numbers: Numbers
    not_applied: bool = False
    """Whether it is proven that no shard has applied it."""


@dataclass
class Session:
    """One writer of an epoch. Safe to use from any thread.

    Args:
        before: the same client's previous writer, whose numbers the shards have forgotten.
    """

    epoch: int
    opener: bytes
    num_shards: int
    writer: bytes = field(default_factory=lambda: os.urandom(16))
    before: InitVar[Session | None] = None

    def __post_init__(self, before: Session | None) -> None:
        # Not entered through the Condition: a signal in `Condition.__enter__` leaves its lock taken for ever.
        self._lock: threading.RLock = before._lock if before else threading.RLock()
        self._changed: threading.Condition = before._changed if before else threading.Condition(self._lock)
        self._next = [1] * self.num_shards
        self._open: list[Numbers] = []  # of writes that are under way, or have failed
        self._failed: list[tuple[bytes, Numbers]] = []  # oldest first; equal writes may fail several times
        self._given_up: set[bytes] = before._given_up if before else set()
        """Digests of failed writes that can no longer be repeated."""
        self._unfinished_rollback: str = before._unfinished_rollback if before else ""
        self._left = False
        self.openers = {self.opener}
        """Openers of the sessions that this writer is in, was in, or tried to open. While a shard is in one of these,
        it knows the writer's numbers."""
        if before is not None:
            before._leave()

    def renew(self, epoch: int, opener: bytes) -> None:
        """Moves to a newer epoch that the same client opened. The shards still know the writer's numbers, so that
        writes that failed, or are under way in another thread, may be repeated there."""
        with self._lock:
            self.epoch, self.opener = epoch, opener

    def _leave(self) -> None:
        """Gives up all failed writes, and those under way that will fail: they can no longer be repeated."""
        with self._lock:
            self._left = True
            while self._failed:
                self._give_up(0)

    def write(self, shards: Iterable[int], digest: Callable[[], bytes], send: Callable[[Write], Result]) -> Result:
        """Sends a write to those shards under new numbers, or under those of a failed write of the same digest. Waits
        while the shards could record no further number.

        If `send` raises, the outcome of the write is unknown and its numbers are kept for its repetition, unless it is
        `not_applied`. An interrupt may come anywhere here. That rules out context managers: it could hit one that is
        written in Python outside of both its body and its own `try`.

        Raises:
            ClusterError: a rollback has not succeeded yet, or the write failed so long ago that the shards no longer
                know whether it was applied.
        """
        write, repeated = Write({}), False
        try:
            repeated = self._begin(write, shards, digest)
            result = send(write)
            self._settle(write)
        except BaseException:
            if write.numbers and (repeated or not write.not_applied):
                self._fail(write, digest())
            else:
                self._settle(write)
            raise
        return result

    def change(self, send: Callable[[Numbers], None]) -> None:
        """Sends one change to every shard, under new numbers. After a failure it is repeated under other numbers, which
        changes nothing on shards that have made it; a late attempt of the first has no effect after a later write.

        Raises:
            ClusterError: a rollback has not succeeded yet.
        """
        change = Write({})
        try:
            self._begin(change, range(self.num_shards))
            send(change.numbers)
            self._settle(change)
        except BaseException:
            self._settle(change)
            raise

    def roll_back(self, name: str, send: Callable[[Write], None]) -> None:
        """Gives up every failed write, so that none is applied later, then sends a rollback to every shard. No other
        write begins until it has ended on all shards, or on none.

        Raises:
            InvalidRequestError: writes of other threads are under way.
        """
        write, unfinished_before = Write({}), self._unfinished_rollback
        try:
            self._begin_rollback(write, name)
            send(write)
            with self._lock:
                self._given_up.clear()  # the rollback undid any effect of them
                self._settle(write)
                self._unfinished_rollback = ""
        except BaseException:
            if write.not_applied:
                self._unfinished_rollback = unfinished_before
            self._settle(write)
            raise

    def _begin(self, write: Write, shards: Iterable[int], digest: Callable[[], bytes] | None = None) -> bool:
        """Numbers the write. Returns whether it is one that failed before: a refusal then does not prove that it was
        not applied."""
        with self._lock:
            if self._unfinished_rollback:
                raise ClusterError(
                    f"rollback({self._unfinished_rollback!r}) is under way, or has failed on some of the shards: "
                    "repeat it before any other write"
                )
            if digest and (self._failed or self._given_up):
                wanted = digest()
                for position, (failed, numbers) in enumerate(self._failed):
                    if failed == wanted:
                        write.numbers = numbers
                        del self._failed[position]
                        return True
                if wanted in self._given_up:
                    raise ClusterError(
                        "this write failed before, too long ago or in another client's session, and may have been "
                        "applied on some of the shards: roll back to a checkpoint"
                    )
            self._number(write, shards)
            return False

    def _begin_rollback(self, write: Write, name: str) -> None:
        with self._lock:
            failed = [id(numbers) for _, numbers in self._failed]
            if any(id(numbers) not in failed for numbers in self._open):
                raise InvalidRequestError("other writes of this client are under way: let them return, then roll back")
            while self._failed:
                self._give_up(0)
            self._unfinished_rollback = name
            self._number(write, range(self.num_shards))

    def settled_before(self, shard: int) -> int:
        """The number below which every write to `shard` is settled."""
        with self._lock:
            return self._oldest(shard) or self._next[shard]

    def header(
        self,
        shard: int,
        number: int,
        *,
        step: int,
        table: int,
        num_rows: int = 0,
        num_blocks: int = 0,
        schedule: int = 0,
    ) -> pb.WriteHeader:
        """The header of a write under one of its numbers."""
        return pb.WriteHeader(
            epoch=self.epoch,
            opener=self.opener,
            writer=self.writer,
            sequence=number,
            settled_before=self.settled_before(shard),
            step=step,
            num_rows=num_rows,
            num_blocks=num_blocks,
            table=table,
            schedule=schedule,
        )

    def _settle(self, write: Write) -> None:
        """Ends a write that will not be sent again; attempts that arrive later have no effect."""
        with self._lock:
            self._close(write.numbers)

    def _fail(self, write: Write, digest: bytes) -> None:
        """Remembers the numbers of a write that may have been applied on some of its shards."""
        with self._lock:
            if not any(write.numbers is numbers for _, numbers in self._failed):
                self._failed.append((digest, write.numbers))
            if self._left or len(self._failed) > MAX_FAILED:
                self._give_up(0)
            self._changed.notify_all()

    def _number(self, write: Write, shards: Iterable[int]) -> None:
        wanted = list(shards)
        while full := [shard for shard in wanted if self._is_full(shard)]:
            oldest = self._oldest(full[0])
            failed = [position for position, (_, known) in enumerate(self._failed) if known.get(full[0]) == oldest]
            if failed:
                self._give_up(failed[0])
            else:
                self._changed.wait()  # another thread is sending it
        numbers = {}
        for shard in wanted:
            numbers[shard] = self._next[shard]
            self._next[shard] += 1
        self._open.append(write.numbers)
        write.numbers.update(numbers)  # one step, for the write and for the list of open ones

    def _is_full(self, shard: int) -> bool:
        oldest = self._oldest(shard)
        return oldest is not None and self._next[shard] - oldest >= WINDOW

    def _oldest(self, shard: int) -> int | None:
        """The lowest number of an open write."""
        return min((numbers[shard] for numbers in self._open if shard in numbers), default=None)

    def _give_up(self, position: int) -> None:
        digest, numbers = self._failed[position]
        self._given_up.add(digest)
        self._close(numbers)
        del self._failed[position]

    def _close(self, numbers: Numbers) -> None:
        self._open = [known for known in self._open if known is not numbers]
        self._changed.notify_all()
