"""Builds answers from a shard's state."""

from __future__ import annotations

from weightserver.common.version import __version__
from weightserver.core.checkpoints import ShardCheckpoint
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import spec_to_proto
from weightserver.shard.schedule_change import ScheduleState
from weightserver.shard.shard import Shard
from weightserver.storage.records import State


def describe_response(shard: Shard) -> pb.DescribeResponse:
    state, schedule = shard.state, shard.schedule
    return pb.DescribeResponse(
        shard=shard.shard,
        num_shards=shard.num_shards,
        spec=None if shard.spec is None else spec_to_proto(shard.spec),
        epoch=state.epoch,
        clock=state.clock,
        horizon=schedule.hash.horizon,
        rows_stored=state.rows_stored,
        disk_bytes=shard.disk_bytes(),
        run=state.run,
        generation=state.generation,
        server_version=__version__,
        schedule_version=state.schedule_version,
        table_identity=shard.table_identity,
        opener=bytes.fromhex(state.opener),
        peers=shard.peers,
        timeline=bytes.fromhex(state.timeline),
        checkpoints=[_checkpoint(known) for known in state.checkpoints],
        schedule_digest=schedule.digest,
        pending_schedule=None
        if schedule.pending is None
        else pb.PendingSchedule(change=bytes.fromhex(schedule.pending.change), schedule_digest=schedule.pending.digest),
    )


def _checkpoint(known: ShardCheckpoint) -> pb.Checkpoint:
    return pb.Checkpoint(
        name=known.name,
        step=known.step,
        identity=known.checkpoint_id,
        clock=known.clock,
        rows_stored=known.rows_stored,
        mark=known.mark,
    )


def extend_schedule_response(state: State, schedule: ScheduleState, change: str) -> pb.ExtendScheduleResponse:
    pending = schedule.pending if schedule.pending is not None and schedule.pending.change == change else None
    return pb.ExtendScheduleResponse(
        horizon=max(schedule.hash.horizon, pending.stop_step if pending else 0),
        version=state.schedule_version,
        pending=pending is not None,
        schedule=pending.digest if pending else schedule.digest,
    )


def read_blocks_response(shard: Shard, request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
    blocks, next_block = shard.read_blocks(request.first_block, checkpoint=request.checkpoint)
    return pb.ReadBlocksResponse(
        blocks=[pb.Block(number=number, content=content) for number, content in blocks],
        next_block=next_block or 0,
        lineage=[] if next_block else shard.lineage_of(request.checkpoint).marks,
    )
