"""Results of a `WeightClient`: rows with their state, and descriptions of the table and its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightserver.client.agreement import Answers, checkpoints_of
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.checkpoints import Checkpoint
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb


@dataclass(frozen=True)
class RowState:
    """Rows with all their state."""

    weight: Float32Array  # (n, D)
    momentum_buffer: Float32Array  # (n, D)
    last_step: Int64Array  # (n,), the number of updates that each row as given here has seen


@dataclass(frozen=True)
class ShardInfo:
    """One shard's part of a table."""

    shard: int
    address: str
    epoch: int
    clock: int
    rows_stored: int
    disk_bytes: int
    version: str
    checkpoints: tuple[Checkpoint, ...]
    """All that this shard retains, whether or not other shards do; oldest first."""


@dataclass(frozen=True)
class TableInfo:
    """A table over all its shards."""

    spec: TableSpec
    identity: bytes
    """16 random bytes, drawn when the table was created."""
    epoch: int
    """Newest session."""
    run: str
    """Name of the newest session."""
    clock: int
    """Highest number of finished updates that an acknowledged write carried."""
    horizon: int
    """Number of learning rates that the client knows."""
    rows_stored: int
    """Number of rows ever written."""
    disk_bytes: int
    shards: tuple[ShardInfo, ...]

    @property
    def checkpoint_names(self) -> set[str]:
        """Names of the checkpoints that at least one shard retains."""
        return {kept.name for shard in self.shards for kept in shard.checkpoints}


def shard_info(answer: pb.DescribeResponse, address: str) -> ShardInfo:
    return ShardInfo(
        shard=answer.shard,
        address=address,
        epoch=answer.epoch,
        clock=answer.clock,
        rows_stored=answer.rows_stored,
        disk_bytes=answer.disk_bytes,
        version=answer.server_version,
        checkpoints=checkpoints_of(answer),
    )


def table_info(spec: TableSpec, identity: bytes, horizon: int, answers: Answers, addresses: Sequence[str]) -> TableInfo:
    """Sums up what the shards at `addresses` answered, in the order of shards."""
    newest = max(answers, key=lambda answer: answer.epoch)
    return TableInfo(
        spec=spec,
        identity=identity,
        epoch=newest.epoch,
        run=newest.run,
        clock=max(answer.clock for answer in answers),
        horizon=horizon,
        rows_stored=sum(answer.rows_stored for answer in answers),
        disk_bytes=sum(answer.disk_bytes for answer in answers),
        shards=tuple(map(shard_info, answers, addresses)),
    )
