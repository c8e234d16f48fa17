"""A writer's sequence numbers, as its client keeps them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field

from weightserver._generated import weight_server_pb2 as pb
from weightserver.errors import ClusterError, InvalidRequestError
from weightserver.exactly_once import WINDOW

MAX_FAILED = 64
"""Failed writes that can be repeated. The oldest is given up beyond this number, and any that lies WINDOW writes back,
because the shard could take note of no further write: repeating it is refused then."""

Numbers = dict[int, int]
"""shard -> sequence number of one write."""


@dataclass
class Session:
    """One writer of an epoch. Safe to use from any thread.

    Args:
        before: the same client's session before this one; what that left undone this one knows of.
    """

    epoch: int
    num_shards: int
    writer: bytes = field(default_factory=lambda: os.urandom(16))
    before: InitVar[Session | None] = None

    def __post_init__(self, before: Session | None) -> None:
        self._changed = threading.Condition()
        self._next = [1] * self.num_shards
        self._open: list[set[int]] = [set() for _ in range(self.num_shards)]
        self._failed: list[tuple[bytes, Numbers]] = []  # oldest first; equal writes may fail several times
        self._given_up: set[bytes] = set()  # writes that failed and whose numbers are gone
        self._unfinished_rollback = ""
        if before is not None:
            with before._changed:
                self._given_up = before._given_up | {digest for digest, _ in before._failed}
                self._unfinished_rollback = before._unfinished_rollback

    def begin(self, shards: Iterable[int] | None = None, digest: Callable[[], bytes] | None = None) -> Numbers:
        """The numbers of a write to those shards, or to all: new ones, or those under which the write of that digest
        failed before. Waits while the shards could take note of no further number.

        Raises:
            ClusterError: a rollback has not succeeded yet, or the write failed so long ago that it cannot be told
                whether it was applied.
        """
        with self._changed:
            if self._unfinished_rollback:
                raise ClusterError(
                    f"rollback({self._unfinished_rollback!r}) is under way, or has failed on some of the shards: "
                    "repeat it before any other write"
                )
            if digest and (self._failed or self._given_up):
                wanted = digest()
                for position, (failed, numbers) in enumerate(self._failed):
                    if failed == wanted:
                        del self._failed[position]
                        return numbers
                if wanted in self._given_up:
                    raise ClusterError(
                        "this write failed before, too long ago or in an earlier session, and may have been applied on "
                        "some of the shards: roll back to a checkpoint"
                    )
            return self._number(shards)

    def begin_rollback(self, name: str) -> Numbers:
        """Gives up every failed write, so that none of them comes after the rollback; nothing else may begin before it
        has ended.

        Raises:
            InvalidRequestError: writes of other threads are under way.
        """
        with self._changed:
            failed = [set[int]() for _ in range(self.num_shards)]
            for _, numbers in self._failed:
                for shard, number in numbers.items():
                    failed[shard].add(number)
            if failed != self._open:
                raise InvalidRequestError("other writes of this client are under way: let them return, then roll back")
            while self._failed:
                self._give_up(0)
            self._unfinished_rollback = name
            return self._number()

    def end_rollback(self, *, done: bool) -> None:
        """It was done on all shards, or on none."""
        with self._changed:
            self._unfinished_rollback = ""
            if done:
                self._given_up.clear()  # what was applied of them is undone

    def settled_before(self, shard: int) -> int:
        """The number below which no write to `shard` is open any more."""
        with self._changed:
            return min(self._open[shard], default=self._next[shard])

    def header(
        self, shard: int, number: int, *, step: int, table: int, num_rows: int = 0, schedule: int = 0
    ) -> pb.WriteHeader:
        """What a write under one of its numbers carries."""
        return pb.WriteHeader(
            epoch=self.epoch,
            writer=self.writer,
            sequence=number,
            settled_before=self.settled_before(shard),
            step=step,
            num_rows=num_rows,
            table=table,
            schedule=schedule,
        )

    def settle(self, numbers: Numbers) -> None:
        """Ends a write that will not be sent again; what of it is still on its way comes too late."""
        with self._changed:
            self._close(numbers)

    def fail(self, numbers: Numbers, digest: bytes) -> None:
        """Remembers the numbers of a write that may have been applied on some of its shards."""
        with self._changed:
            self._failed.append((digest, numbers))
            if len(self._failed) > MAX_FAILED:
                self._give_up(0)
            self._changed.notify_all()

    def _number(self, shards: Iterable[int] | None = None) -> Numbers:
        wanted = list(range(self.num_shards) if shards is None else shards)
        while full := [shard for shard in wanted if self._is_full(shard)]:
            oldest = min(self._open[full[0]])
            failed = [position for position, (_, numbers) in enumerate(self._failed) if numbers.get(full[0]) == oldest]
            if failed:
                self._give_up(failed[0])
            else:
                self._changed.wait()  # it is on its way in another thread
        numbers = {}
        for shard in wanted:
            numbers[shard] = self._next[shard]
            self._next[shard] += 1
            self._open[shard].add(numbers[shard])
        return numbers

    def _is_full(self, shard: int) -> bool:
        return bool(self._open[shard]) and self._next[shard] - min(self._open[shard]) >= WINDOW

    def _give_up(self, position: int) -> None:
        digest, numbers = self._failed.pop(position)
        self._given_up.add(digest)
        self._close(numbers)

    def _close(self, numbers: Numbers) -> None:
        for shard, number in numbers.items():
            self._open[shard].discard(number)
        self._changed.notify_all()
