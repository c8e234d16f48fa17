"""The writer of a client: its writes take turns, each under a higher number, which shards apply at most once.

If a write fails and may have been applied, the next one settles it first: every shard says whether it has applied it,
and never will if it has not. Where only some of its shards have, other writes are refused until the same call has been
made again, for the others, or a rollback has undone it. Where all have, a push that is repeated later is still known to
be done; a state write is made again, since another one may have replaced its rows.

An interrupt may come anywhere here. That rules out context managers in Python code: it could hit one outside of both
its body and its own `try`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, NamedTuple

from weightserver.client import threads
from weightserver.client.fan_out import Shards
from weightserver.client.rates import CarriedRates
from weightserver.client.threads import is_not_applied, raise_first
from weightserver.core.errors import ClusterError
from weightserver.protocol._generated import weight_server_pb2 as pb

_OF_ANOTHER_TIME = (
    "an earlier write of this client failed, and another client has rolled back, restored or resharded the rows since: "
    "it may be part of them or not, so roll back to a checkpoint"
)
Send = Callable[[int, Collection[int]], list[Any]]
"""Sends a write by its number to some shards; returns the answer or error of each."""


class Session(NamedTuple):
    """A session that a client has opened or joined."""

    epoch: int
    session_id: bytes
    timeline: bytes
    """Timeline of the shards when the session began, or after its last rollback."""


@dataclass
class _Write:
    """A write that is being made, or whose caller does not know that it was."""

    digest: bytes
    """Recognises it when it is repeated."""
    shards: Collection[int]
    """Shards that may apply it under this number."""
    num_steps: int
    """Number of steps whose learning rates it uses."""
    adds: bool
    """Whether it adds to the rows instead of replacing them."""
    timeline: bytes = b""
    number: int = 0
    is_applied: bool = False
    """Whether all shards have applied it."""
    is_partial: bool = False
    """Whether it was applied on other shards, under an earlier number."""


class Writer:
    """Numbers the writes of a client. Safe to use from any thread.

    Args:
        were_used: is told the number of steps whose learning rates a write has used on all its shards.
    """

    def __init__(self, shards: Shards, were_used: Callable[[int], None]) -> None:
        self.session: Session | None = None
        self.steps_of_checkpoint = 0
        """Number of steps whose learning rates a checkpoint of unknown outcome may have used."""
        self._shards = shards
        self._were_used = were_used
        self._id = os.urandom(16)
        self._turn = Lock()
        self._number = 0
        self._unsettled: _Write | None = None
        self._untold: dict[bytes, _Write] = {}
        """Writes that were applied although their calls failed, by their digests."""
        self._unfinished_rollback = ""

    # ---- writes of rows

    @property
    def num_steps_in_doubt(self) -> int:
        """Number of steps whose learning rates a write or checkpoint of unknown outcome may have used."""
        write = self._unsettled
        return max(self.steps_of_checkpoint, write.num_steps if write else 0)

    def write(self, digest: bytes, shards: Collection[int], send: Send, *, num_steps: int, adds: bool) -> None:
        """Makes a write once: sends it, or finds that an earlier call with the same digest has.

        Args:
            num_steps: number of steps whose learning rates it uses.
            adds: whether it adds to the rows instead of replacing them.

        Raises:
            ClusterError: an earlier write was applied on some of its shards only, or a rollback has not succeeded yet.
        """
        made = _Write(digest, shards, num_steps, adds)
        try:
            with self._turn:
                self._write(made, send)
        except BaseException:
            if made.is_applied:  # an interrupt before the caller was told
                self._untold[digest] = made
            raise

    def _write(self, made: _Write, send: Send) -> None:
        made.timeline = self._timeline
        self._settle(made.digest)
        if (known := self._untold.get(made.digest)) is not None:
            answers = self._shards.describe()  # raises DataLossError if a shard does not hold it any more
            if not known.timeline == made.timeline == answers[0].timeline:
                raise ClusterError(_OF_ANOTHER_TIME)
            made.is_applied = True
            del self._untold[made.digest]
            return
        if (write := self._unsettled) is None:
            self._untold = {digest: known for digest, known in self._untold.items() if known.adds}
            made.number = self._next_number()
            write = self._unsettled = made
        outcomes = send(write.number, write.shards)
        if not write.is_partial and is_not_applied(outcomes):
            self._unsettled = None
        raise_first(outcomes)
        made.is_applied = True
        self._were_used(write.num_steps)
        self._unsettled = None

    def _settle(self, repeated: bytes = b"") -> None:
        """Finds out where the unsettled write was applied, if there is one, and has the other shards refuse it. If only
        some have it, it stays unsettled on the others; that is an error unless it is now to be `repeated`."""
        self._require_one_state()
        if (write := self._unsettled) is None:
            return
        request = pb.SettleWriteRequest(header=self.header(write.number))
        connections = [self._shards.connections()[shard] for shard in write.shards]
        answers = self._shards.in_parallel(
            lambda connection: connection.call("SettleWrite", request), zip(connections, strict=True)
        )
        if any(answer.applied for answer in answers) and self._shards.timeline() != write.timeline:
            raise ClusterError(_OF_ANOTHER_TIME)  # another writer of the session has rolled back
        missing = [shard for shard, answer in zip(write.shards, answers, strict=True) if not answer.applied]
        if not missing:
            self._untold[write.digest] = write
            self._were_used(write.num_steps)
            self._unsettled = None
        elif len(missing) == len(write.shards) and not write.is_partial:
            self._unsettled = None
        else:
            self._unsettled = replace(write, number=self._next_number(), shards=missing, is_partial=True)
            if write.digest != repeated:
                raise ClusterError(
                    f"an earlier write of this client failed on shard {', '.join(map(str, missing))} and was applied "
                    "on others: repeat it, or roll back to a checkpoint"
                )

    # ---- other changes

    def in_turn(self, send: Callable[[int], None]) -> None:
        """Has one change sent to every shard, by its number. After a failure it is repeated under another number, which
        changes nothing on shards that have made it. Raises as `write`."""
        with self._turn:
            self._settle()
            send(self._next_number())

    def change(self, method: str, request: Any) -> None:
        """Makes one change of every shard, as `in_turn`."""

        def send(number: int) -> None:
            request.header.CopyFrom(self.header(number))
            raise_first(self.send(method, request))

        self.in_turn(send)

    def roll_back(self, request: pb.CheckpointRequest) -> None:
        """Sends a rollback to every shard, which gives up an unsettled write. No other write is made until it has ended
        on all shards, or on none."""
        with self._turn:
            unfinished_before, self._unfinished_rollback = self._unfinished_rollback, request.name
            request.header.CopyFrom(self.header(self._next_number()))
            outcomes = self.send("Rollback", request)
            if is_not_applied(outcomes):
                self._unfinished_rollback = unfinished_before
            raise_first(outcomes)
            self._unsettled, self.steps_of_checkpoint = None, 0
            self._untold.clear()
            if self.session is not None:
                self.session = self.session._replace(timeline=request.timeline)
            self._unfinished_rollback = ""

    def enter(self, open_session: Callable[[], Session]) -> Session:
        """Opens or joins a session between two writes."""
        with self._turn:
            self.session = session = open_session()
            return session

    # ---- requests

    def header(self, number: int, **fields: Any) -> pb.WriteHeader:
        """The header of a write under its number."""
        session = self.session
        epoch, session_id = (session.epoch, session.session_id) if session else (0, b"")
        return pb.WriteHeader(
            epoch=epoch,
            session_id=session_id,
            writer=self._id,
            sequence=number,
            table=self._shards.table,
            **fields,
        )

    def send(
        self, method: str, request: Any, which: slice = slice(None), rates: CarriedRates | None = None
    ) -> list[Any]:
        """Sends one request to some or all shards; returns the answer or error of each."""
        connections = self._shards.connections()[which]
        return threads.outcomes(
            lambda connection: connection.call(method, request, rates=rates), zip(connections, strict=True)
        )

    def _require_one_state(self) -> None:
        """Raises ClusterError where only a rollback leads to a state that this client knows."""
        if self._unfinished_rollback:
            raise ClusterError(
                f"rollback({self._unfinished_rollback!r}) has failed on some of the shards: repeat it before any other "
                "write"
            )
        if self._unsettled is not None and self._unsettled.timeline != self._timeline:
            raise ClusterError(_OF_ANOTHER_TIME)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    @property
    def _timeline(self) -> bytes:
        return self.session.timeline if self.session else b""
