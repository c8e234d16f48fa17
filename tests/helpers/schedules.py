"""Extends a shard's schedule without a client."""

from __future__ import annotations

import os

from weightserver.core.arrays import Float32Array
from weightserver.shard.schedule_change import Part
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteTransaction


def extend_schedule(shard: Shard, batch: WriteTransaction, start_step: int, learning_rates: Float32Array) -> None:
    """Makes both phases of a change in one transaction."""
    part = Part(os.urandom(16).hex(), start_step, learning_rates)
    shard.prepare_schedule(batch, part, version=batch.state.schedule_version)
    if (pending := batch.schedule.pending) is not None:
        shard.commit_schedule(batch, part.change, digest=pending.digest)
