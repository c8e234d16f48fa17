"""How a client finds the checkpoints of all shards, and takes one."""

from __future__ import annotations

import os

from weightserver.client.fan_out import Answers, Shards
from weightserver.client.schedule import ClientSchedule
from weightserver.client.sessions import require_one_timeline
from weightserver.client.threads import is_not_applied, raise_first
from weightserver.client.writer import Writer
from weightserver.core.checkpoints import Checkpoint, common_checkpoints, partly_kept, require_readable, who_keeps
from weightserver.core.errors import NoTableError
from weightserver.protocol._generated import weight_server_pb2 as pb


def checkpoints_of(answer: pb.DescribeResponse) -> tuple[Checkpoint, ...]:
    """The checkpoints that a shard retains, oldest first."""
    return tuple(Checkpoint(kept.name, kept.step, kept.identity, (kept.mark,)) for kept in answer.checkpoints)


def find_checkpoint(shards: Shards, name: str | Checkpoint) -> Checkpoint:
    """The checkpoint of that name which every shard retains; a checkpoint itself is not looked for.

    Raises:
        NoTableError: a shard has no such checkpoint, or one of another call.
    """
    return name if isinstance(name, Checkpoint) else checkpoint_in(shards.describe(), name)


def checkpoint_in(answers: Answers, name: str) -> Checkpoint:
    """The checkpoint of that name which every shard retains, as these answered. Raises as `find_checkpoint`."""
    by_shard = [checkpoints_of(answer) for answer in answers]
    for kept in common_checkpoints(by_shard):
        if kept.name == name:
            return kept
    groups = partly_kept(by_shard).get(name, [])
    raise NoTableError(f"{who_keeps(name, groups)}: checkpoints(), or 'weightserver checkpoints', lists those of all")


def take_checkpoint(shards: Shards, writer: Writer, schedule: ClientSchedule, name: str, step: int) -> None:
    """See `WeightClient.checkpoint`.

    Raises:
        ClusterError: the shards' rows are of several times or rates.
        StepError: `step` lies below a shard's clock. Nothing was sent: another shard would have kept it.
    """

    def send(number: int) -> None:
        answers = shards.describe()
        require_one_timeline(answers)
        if all(kept.name != name for answer in answers for kept in answer.checkpoints):  # else a call is repeated
            require_readable(name, step, max(answer.clock for answer in answers))
        schedule.learn(answers)
        rates = schedule.used(step)
        request = pb.CheckpointRequest(name=name, identity=os.urandom(16), peers=shards.marks())
        request.header.CopyFrom(writer.header(number, step=step))
        before, writer.steps_of_checkpoint = writer.steps_of_checkpoint, max(writer.steps_of_checkpoint, step)
        outcomes = writer.send("Checkpoint", request, slice(1), rates)
        if not isinstance(outcomes[0], BaseException):
            request.identity = outcomes[0].identity  # shard 0's prevails where several calls take the same
            outcomes += writer.send("Checkpoint", request, slice(1, None), rates)
        if is_not_applied(outcomes):
            writer.steps_of_checkpoint = before
        raise_first(outcomes)
        schedule.were_used(step)
        writer.steps_of_checkpoint = before

    writer.in_turn(send)
