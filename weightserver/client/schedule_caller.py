"""How a client changes the learning rates of all shards: prepare on all, commit on shard 0, then on the others.

If it is stopped in between, the next call of any client settles what is pending on the shards: a pending change is
committed if it makes the shard's learning rates the same as shard 0's, else it is given up, on shard 0 first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from weightserver.client.connection import ShardConnection
from weightserver.core.arrays import Float32Array
from weightserver.core.errors import ClusterError, FencedError, WeightServerError
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import ScheduleHash, to_bytes

_RATES_PER_CALL = 1 << 18
InParallel = Callable[..., list[Any]]
Answers = Sequence[pb.DescribeResponse]


class KnownSchedule(NamedTuple):
    """The learning rates that a client knows."""

    digest: int
    horizon: int


def common_schedule(answers: Answers, learning_rates: Callable[[int], Float32Array]) -> KnownSchedule:
    """The learning rates that all shards have: the shortest schedule, if the others begin with it.

    After a restore, a shard may know fewer steps than others.

    Args:
        learning_rates: reads the learning rates of a shard.

    Raises:
        ClusterError: a step has different learning rates on two shards.
    """
    first = KnownSchedule(answers[0].schedule_digest, answers[0].horizon)
    if all(first.digest in (answer.schedule_digest, answer.pending_schedule.schedule_digest) for answer in answers):
        return first  # a pending change is decided, and requests wait until it is committed
    rates = [learning_rates(answer.shard) for answer in answers]
    shortest = min(rates, key=len)
    for shard, mine in enumerate(rates):
        if len(differ := np.flatnonzero(mine[: len(shortest)] != shortest)):
            raise ClusterError(
                f"shard {shard} has another learning rate of step {differ[0]} than shard "
                f"{next(i for i, other in enumerate(rates) if other is shortest)}: repeat extend_schedule() with all "
                "that are right, after a rollback() to a checkpoint where such steps were used"
            )
    return KnownSchedule(ScheduleHash(shortest).digest, len(shortest))


class ScheduleCaller:
    """Changes the schedule of one table.

    Args:
        in_parallel: calls a function for each shard's arguments; raises after all calls have ended.
        epoch: the client's session; 0 without one.
        table: digest of the table that the client knows.
    """

    def __init__(
        self, connections: Sequence[ShardConnection], in_parallel: InParallel, *, epoch: int, table: int
    ) -> None:
        self._connections = connections
        self._in_parallel = in_parallel
        self._epoch = epoch
        self._table = table

    def settle(self, answers: Answers) -> bool:
        """Commits or gives up changes that another call left pending; returns False if there are none."""
        pending = [answer for answer in answers if answer.HasField("pending_schedule")]
        if not pending:
            return False
        decided = answers[0].schedule_digest

        def is_decided(answer: pb.DescribeResponse) -> bool:
            return answer.pending_schedule.schedule_digest == decided != 0

        # Shard 0 also gives up changes that it does not have: their caller may still run, and would otherwise commit
        # one there that the others have given up.
        for change in dict.fromkeys(answer.pending_schedule.change for answer in pending if not is_decided(answer)):
            decided = self._give_up(0, change).schedule

        def end(answer: pb.DescribeResponse) -> None:
            change = answer.pending_schedule.change
            if not is_decided(answer):
                self._give_up(answer.shard, change)
                return
            with contextlib.suppress(FencedError):  # another call has completed it meanwhile
                self._call(answer.shard, pb.SCHEDULE_PHASE_COMMIT, change, schedule=decided)

        others = [(answer,) for answer in pending if answer.shard]
        if others:
            self._in_parallel(end, others)
        return True

    def change(self, answers: Answers, start_step: int, rates: Float32Array) -> KnownSchedule | None:
        """Sets the learning rates from `start_step` on to `rates` (float32 [n]).

        Returns the whole schedule, or None if nothing changed and the shards' schedules differ elsewhere.

        Args:
            answers: the shards' descriptions, in which `settle` found nothing to do.

        Raises:
            ClusterError: the shards have different learning rates for steps that are not given.
            StepError, TableMismatchError, FencedError: as `WeightClient.extend_schedule`; nothing was changed.
        """
        change = os.urandom(16)
        prepare = partial(self._prepare, change=change, start_step=start_step, rates=rates)
        try:
            prepared = self._in_parallel(prepare, [(answer,) for answer in answers])
            known = KnownSchedule(prepared[0].schedule, prepared[0].horizon)
            if any(other.schedule != known.digest for other in prepared):
                if not any(other.pending for other in prepared):
                    return None
                raise ClusterError(
                    "the shards have different learning rates for steps that were not given: call extend_schedule(0, "
                    "...) with all of them"
                )
            commit = partial(self._call, phase=pb.SCHEDULE_PHASE_COMMIT, change=change, schedule=known.digest)
            if prepared[0].pending:
                commit(0, epoch=self._epoch)
        except BaseException:
            self._abandon(answers, change)
            raise
        if others := [(shard,) for shard, answer in enumerate(prepared) if shard and answer.pending]:
            self._in_parallel(commit, others)
        return known

    def _prepare(
        self, answer: pb.DescribeResponse, change: bytes, start_step: int, rates: Float32Array
    ) -> pb.ExtendScheduleResponse:
        """Sends all parts of a change to one shard; returns its last answer."""
        for first in range(0, max(1, len(rates)), _RATES_PER_CALL):
            end = first + _RATES_PER_CALL
            prepared = self._call(
                answer.shard,
                pb.SCHEDULE_PHASE_PREPARE,
                change,
                start_step=start_step + first,
                learning_rates=to_bytes(rates[first:end]),
                epoch=self._epoch,
                version=answer.schedule_version,
                last=end >= len(rates),
            )
            if prepared.version != answer.schedule_version:
                raise FencedError(
                    "another call changed the learning rates meanwhile: call extend_schedule() again if these are "
                    "still right"
                )
        return prepared

    def _abandon(self, answers: Answers, change: bytes) -> None:
        """Tries once to give up a change that was not committed; if that fails, the next call settles it."""
        with contextlib.suppress(WeightServerError):
            if self._give_up(0, change, once=True).schedule == answers[0].schedule_digest and answers[1:]:
                give_up = partial(self._give_up, change=change, once=True)
                self._in_parallel(give_up, [(answer.shard,) for answer in answers[1:]])

    def _give_up(self, shard: int, change: bytes, *, once: bool = False) -> pb.ExtendScheduleResponse:
        return self._call(shard, pb.SCHEDULE_PHASE_GIVE_UP, change, once=once)

    def _call(
        self, shard: int, phase: pb.SchedulePhase, change: bytes, *, once: bool = False, **fields: Any
    ) -> pb.ExtendScheduleResponse:
        request = pb.ExtendScheduleRequest(phase=phase, change=change, table=self._table, **fields)
        answer: pb.ExtendScheduleResponse = self._connections[shard].call("ExtendSchedule", request, once=once)
        return answer
