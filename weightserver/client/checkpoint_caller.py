"""How a client takes, copies and releases checkpoints on all shards, and returns to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from google.protobuf.message import Message

from weightserver.client import agreement, threads
from weightserver.client.agreement import Answers
from weightserver.client.fan_out import Shards, is_not_applied
from weightserver.client.rates import CarriedRates
from weightserver.client.threads import raise_first
from weightserver.client.writer import Writer
from weightserver.core.checkpoints import Checkpoint, common_checkpoints
from weightserver.core.errors import NoTableError
from weightserver.protocol._generated import weight_server_pb2 as pb


def checkpoints(shards: Shards) -> list[Checkpoint]:
    """The checkpoints that every shard retains, in the order of their steps."""
    return common_checkpoints(list(map(agreement.checkpoints_of, shards.describe())))


def find_checkpoint(shards: Shards, name: str) -> Checkpoint:
    """The checkpoint of that name which every shard retains.

    Raises:
        NoTableError: a shard has no such checkpoint, or one of another call.
    """
    for kept in checkpoints(shards):
        if kept.name == name:
            return kept
    having = shards_with(shards, name)
    if all(having):
        raise NoTableError(f"the shards' checkpoints {name!r} are not of one call: use one of checkpoints()")
    raise NoTableError(
        f"shard {having.index(False)} has no checkpoint {name!r}: call checkpoints() for those of all shards"
    )


def shards_with(shards: Shards, name: str) -> list[bool]:
    """Whether each shard has a checkpoint of that name."""
    return [any(kept.name == name for kept in answer.checkpoints) for answer in shards.describe()]


class CheckpointCaller:
    """Changes checkpoints of one table, in one session.

    Args:
        table: digest of the table.
    """

    def __init__(self, shards: Shards, writer: Writer, table: int) -> None:
        self._shards = shards
        self._writer = writer
        self._table = table

    def take(self, name: str, step: int, rates: CarriedRates, compare: Callable[[Answers], object]) -> None:
        """Takes a checkpoint, on shard 0 first.

        Args:
            rates: those before `step`.
            compare: raises ClusterError if the shards have used different learning rates.
        """
        request = partial(pb.CheckpointRequest, name=name, peers=self._shards.marks())

        def send(number: int) -> None:
            answers = self._shards.describe()
            agreement.require_one_timeline(answers)
            compare(answers)

            def take(shards: Collection[int], identity: bytes) -> list[Any]:
                outcomes = self._send(
                    "Checkpoint", partial(request, identity=identity), number, shards, step=step, rates=rates
                )
                if 0 in shards and is_not_applied(outcomes):
                    rates.were_refused()
                raise_first(outcomes)
                return outcomes

            rates.are_sent()
            shard_0, *others = range(len(self._shards.connections()))
            (first,) = take([shard_0], os.urandom(16))  # shard 0's identity prevails where several calls take the same
            if others:
                take(others, first.identity)
            rates.were_used()

        self._writer.change(self._table, send)

    def roll_back(self, checkpoint: Checkpoint) -> None:
        timeline = os.urandom(16)
        request = partial(
            pb.CheckpointRequest,
            name=checkpoint.name,
            identity=checkpoint.checkpoint_id,
            peers=self._shards.marks(),
            timeline=timeline,
        )
        self._writer.roll_back(checkpoint.name, timeline, lambda number: self._send("Rollback", request, number))

    def release(self, name: str) -> None:
        self._change("Release", partial(pb.CheckpointRequest, name=name))

    def copy(self, checkpoint: Checkpoint, name: str) -> None:
        source, checkpoint_id = checkpoint.name, checkpoint.checkpoint_id
        request = partial(pb.CopyCheckpointRequest, name=name, source=source, identity=checkpoint_id)
        self._change("CopyCheckpoint", request)

    def _change(self, method: str, make_request: Callable[..., Message]) -> None:
        """Makes one change of every shard."""
        self._writer.change(self._table, lambda number: raise_first(self._send(method, make_request, number)))

    def _send(
        self,
        method: str,
        make_request: Callable[..., Message],
        number: int,
        shards: Iterable[int] | None = None,
        *,
        step: int = 0,
        rates: CarriedRates | None = None,
    ) -> list[Any]:
        """Sends a change by its number to some or all shards; returns the answer or error of each."""
        connections = self._shards.connections()

        def change(shard: int) -> Any:
            header = self._writer.header(number, step=step, table=self._table)
            return connections[shard].call(method, make_request(header=header), rates=rates)

        return threads.outcomes(change, zip(range(len(connections)) if shards is None else shards, strict=False))
