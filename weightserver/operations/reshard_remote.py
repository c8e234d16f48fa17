"""Fills one new shard from running shards over the network: each machine receives what its own shard needs."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from weightserver.client.client import WeightClient
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import Checkpoint, chosen_checkpoint
from weightserver.core.errors import NoTableError
from weightserver.core.lineage import Lineage
from weightserver.operations.checkpoint_blocks import CheckpointReader
from weightserver.operations.reshard_rows import Resharded, compare, fill
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.storage.shard_builder import ShardBuilder, TableState


def reshard_from(
    client: WeightClient,
    target: Path,
    *,
    shard: int,
    num_shards: int,
    rows_per_block: int | None = None,
    checkpoint: str | None = None,
) -> Resharded:
    """Fills the new directory of shard `shard` of `num_shards` with its rows of a checkpoint, by default the newest.

    Calls for different shards need not know of each other. An interrupted call may be repeated.

    Raises:
        ValueError: the target holds something else.
        NoTableError: not all shards keep the checkpoint, until the end.
        ClusterError, StorageError: blocks are missing or damaged.
    """
    info, chosen = client.describe(), chosen_checkpoint(checkpoint, client.checkpoints())
    new = info.spec if rows_per_block is None else replace(info.spec, rows_per_block=rows_per_block)
    part = pb.Part(shard=shard, num_shards=num_shards, rows_per_block=new.rows_per_block)
    readers = [CheckpointReader(client, number, chosen.name, info, part) for number in range(len(info.shards))]
    kept = [chosen.name, chosen.step, chosen.checkpoint_id.hex()]
    origin = {"table": info.identity.hex(), "spec": asdict(new), "checkpoint": kept}
    with ShardBuilder(target, shard=shard, num_shards=num_shards, origin=origin) as builder:
        sources = [((block.number, block.content) for block in reader.blocks()) for reader in readers]
        (digest,) = fill(sources, [builder], info.spec, new, num_shards)
        _require_kept(client, chosen)
        if not builder.finished:  # it may have been served since
            table = TableState(
                new,
                client.learning_rates()[: chosen.step],
                epoch=info.epoch,
                run=info.run,
                clock=chosen.step,
                checkpoint=chosen,
                identity=info.identity,
                timeline=chosen.checkpoint_id.hex(),
                lineage=Lineage().joined(mark for reader in readers for mark in reader.lineage),
            )
            same_rows = partial(compare, target, BlockCodec(new), digest)
            builder.finish(table, rows_stored=digest.num_rows, compare=same_rows)
    return Resharded(new, digest.num_rows, chosen.name, chosen.step, left_behind=max(0, info.clock - chosen.step))


def _require_kept(client: WeightClient, chosen: Checkpoint) -> None:
    """Raises NoTableError if another checkpoint took the name while it was read."""
    if chosen.checkpoint_id not in {kept.checkpoint_id for kept in client.checkpoints() if kept.name == chosen.name}:
        raise NoTableError(
            f"checkpoint {chosen.name!r} was released while it was read: stop the trainer, and repeat the command"
        )
