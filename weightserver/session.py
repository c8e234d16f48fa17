"""A writer's sequence numbers, as its client keeps them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from weightserver._generated import weight_server_pb2 as pb
from weightserver.errors import ClusterError, InvalidRequestError
from weightserver.exactly_once import WINDOW

MAX_FAILED = 64
"""Failed writes remembered so that repeating one is recognised. The oldest is given up beyond this number, and any that
lies WINDOW writes back, because the shard could take note of no further write."""

Numbers = dict[int, int]
"""shard -> sequence number of one write."""


@dataclass
class Session:
    """One writer of an epoch. Safe to use from any thread."""

    epoch: int
    num_shards: int
    writer: bytes = field(default_factory=lambda: os.urandom(16))

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._next = [1] * self.num_shards
        self._open: list[set[int]] = [set() for _ in range(self.num_shards)]
        self._failed: list[tuple[bytes, Numbers]] = []  # oldest first; equal writes may fail several times
        self._unfinished_rollback = ""

    def begin(self, shards: Iterable[int] | None = None, digest: Callable[[], bytes] | None = None) -> Numbers:
        """The numbers of a write to those shards, or to all: new ones, or those under which the write of that digest
        failed before.

        Raises:
            ClusterError: a rollback failed and was not repeated yet.
        """
        with self._lock:
            if self._unfinished_rollback:
                raise ClusterError(
                    f"rollback({self._unfinished_rollback!r}) has failed on some of the shards: repeat it before any "
                    "other write"
                )
            if self._failed and digest:
                wanted = digest()
                for position, (failed, numbers) in enumerate(self._failed):
                    if failed == wanted:
                        del self._failed[position]
                        return numbers
            return self._number(shards)

    def begin_rollback(self, name: str) -> Numbers:
        """Gives up every failed write, so that none of them comes after the rollback; nothing else may begin before it
        has ended.

        Raises:
            InvalidRequestError: writes of other threads are under way.
        """
        with self._lock:
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

    def end_rollback(self) -> None:
        self._unfinished_rollback = ""

    def _number(self, shards: Iterable[int] | None = None) -> Numbers:
        numbers = {}
        for shard in range(self.num_shards) if shards is None else shards:
            self._make_room(shard)
            numbers[shard] = self._next[shard]
            self._next[shard] += 1
            self._open[shard].add(numbers[shard])
        return numbers

    def settled_before(self, shard: int) -> int:
        """The number below which no write to `shard` is open any more."""
        with self._lock:
            return min(self._open[shard], default=self._next[shard])

    def header(self, shard: int, number: int, *, step: int, table: int, num_rows: int = 0) -> pb.WriteHeader:
        """What a write under one of its numbers carries."""
        return pb.WriteHeader(
            epoch=self.epoch,
            writer=self.writer,
            sequence=number,
            settled_before=self.settled_before(shard),
            step=step,
            num_rows=num_rows,
            table=table,
        )

    def settle(self, numbers: Numbers) -> None:
        """Ends a write that will not be sent again; what of it is still on its way comes too late."""
        with self._lock:
            self._close(numbers)

    def fail(self, numbers: Numbers, digest: bytes) -> None:
        """Remembers the numbers of a write that may have been applied on some of its shards."""
        with self._lock:
            self._failed.append((digest, numbers))
            if len(self._failed) > MAX_FAILED:
                self._give_up(0)

    def _make_room(self, shard: int) -> None:
        """Gives up failed writes that would leave the shard's window no place for the next number."""
        while self._open[shard] and self._next[shard] - (oldest := min(self._open[shard])) >= WINDOW:
            failed = [position for position, (_, numbers) in enumerate(self._failed) if numbers.get(shard) == oldest]
            if not failed:  # still on its way in another thread
                return
            self._give_up(failed[0])

    def _give_up(self, position: int) -> None:
        _, numbers = self._failed.pop(position)
        self._close(numbers)

    def _close(self, numbers: Numbers) -> None:
        for shard, number in numbers.items():
            self._open[shard].discard(number)
