"""Builds answers from a shard's state."""

from __future__ import annotations

from weightserver.common.version import __version__
from weightserver.core.checkpoints import ShardCheckpoint
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import spec_to_proto
from weightserver.shard.reading import CheckpointBlocks
from weightserver.shard.shard import Shard


def describe_response(shard: Shard) -> pb.DescribeResponse:
    state, rates = shard.state, shard.used_rates
    return pb.DescribeResponse(
        shard=shard.shard,
        num_shards=shard.num_shards,
        spec=None if shard.spec is None else spec_to_proto(shard.spec),
        epoch=state.epoch,
        clock=len(rates),
        rows_stored=state.rows_stored,
        disk_bytes=shard.storage.disk_bytes(),
        run=state.run,
        server_version=__version__,
        table_identity=shard.table_identity,
        session_id=bytes.fromhex(state.session_id),
        peers=shard.peers,
        timeline=bytes.fromhex(state.timeline),
        checkpoints=[_checkpoint(known) for known in state.checkpoints],
        holder=shard.lease.holder(bytes.fromhex(state.session_id)),
        schedule_digest=rates.digest(len(rates)),
    )


def _checkpoint(known: ShardCheckpoint) -> pb.Checkpoint:
    return pb.Checkpoint(
        name=known.name,
        step=known.step,
        identity=known.checkpoint_id,
        rows_stored=known.rows_stored,
        mark=known.mark,
    )


def read_blocks_response(found: CheckpointBlocks) -> pb.ReadBlocksResponse:
    return pb.ReadBlocksResponse(
        blocks=[
            pb.Block(number=version.block, content=content, write_id=version.write_id)
            for version, content in found.blocks
        ],
        next_block=found.next_block or 0,
        lineage=found.lineage,
        digest=found.digest,
    )
