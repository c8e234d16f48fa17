"""Operations that change the learning rates of a shard: prepare a change, then commit it or give it up."""

from __future__ import annotations

from dataclasses import replace

from weightserver.core.arrays import Float32Array
from weightserver.core.correction import MAX_STEPS, Schedule
from weightserver.core.errors import FencedError, InvalidRequestError, StepError
from weightserver.shard.schedule_change import Part
from weightserver.shard.sessions import check_epoch
from weightserver.shard.transaction import WriteTransaction


def prepare(batch: WriteTransaction, known: Float32Array, part: Part, *, version: int, epoch: int) -> None:
    """Prepares a part of a change of the `known` learning rates, float32 [horizon].

    Until the change is committed or given up, requests that use one of its steps are refused. A part that arrives again
    changes nothing, however late.
    """
    before = batch.schedule
    if epoch:
        check_epoch(batch.state, epoch)
    if part.stop_step > MAX_STEPS:
        raise StepError(f"a schedule has at most {MAX_STEPS} steps, not {part.stop_step}: give fewer")
    horizon = max(len(known), before.pending.stop_step if before.pending else 0)
    if part.start_step > horizon:
        raise StepError(f"the schedule ends at {horizon}: step {part.start_step} would leave a gap before it")
    batch.schedule = before.prepared(batch.txn, part, known, reached=batch.state.clock)
    if batch.schedule is not before and version != batch.state.schedule_version:
        raise FencedError(
            "the learning rates were changed by another call: call extend_schedule() again if these are still right"
        )


def commit(batch: WriteTransaction, schedule: Schedule, change: str, *, digest: int, epoch: int) -> bool:
    """Commits a prepared change, which leads to learning rates of `digest`; returns False if it was committed before.

    Args:
        schedule: extended once the transaction is durable.
    """
    pending = batch.schedule.pending
    if pending is None or pending.change != change:
        if batch.schedule.digest == digest:
            return False
        raise FencedError(
            "this change of the learning rates was given up by another call: call extend_schedule() again if they "
            "are still right"
        )
    if epoch:
        check_epoch(batch.state, epoch)
    if not pending.digest or pending.digest != digest:
        raise InvalidRequestError("a part of this change of the learning rates is missing: prepare all of them first")
    batch.schedule, rates = batch.schedule.committed(batch.txn, schedule.learning_rates)
    _count_version(batch)
    batch.after_commit.append(lambda: schedule.extend(pending.first_step, rates))
    return True


def give_up(batch: WriteTransaction, change: str) -> bool:
    """Gives up a prepared change, also before it has arrived: its parts then belong to an old version and are refused.

    Returns False if another change is pending, or this one was given up just before.
    """
    before = batch.schedule
    if before.given_up == change or (before.pending is not None and before.pending.change != change):
        return False
    batch.schedule = before.without_pending(batch.txn, change)
    _count_version(batch)
    return True


def _count_version(batch: WriteTransaction) -> None:
    batch.state = replace(batch.state, schedule_version=batch.state.schedule_version + 1)
