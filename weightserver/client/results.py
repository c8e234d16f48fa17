"""Results of a `WeightClient`: rows with their state, and descriptions of the table and its shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightserver.client.checkpoints import checkpoints_of
from weightserver.client.fan_out import Answers
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.checkpoints import Checkpoint
from weightserver.core.spec import TableSpec


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
    holder: str
    """Which process holds it, and for how long; empty if none is known to."""
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


def table_info(spec: TableSpec, horizon: int, answers: Answers, addresses: Sequence[str]) -> TableInfo:
    """Sums up what the shards at `addresses` answered, in the order of shards."""
    shards = tuple(
        ShardInfo(
            shard=answer.shard,
            address=address,
            epoch=answer.epoch,
            clock=answer.clock,
            rows_stored=answer.rows_stored,
            disk_bytes=answer.disk_bytes,
            version=answer.server_version,
            checkpoints=checkpoints_of(answer),
        )
        for answer, address in zip(answers, addresses, strict=True)
    )
    newest = max(answers, key=lambda answer: answer.epoch)
    return TableInfo(
        spec=spec,
        identity=answers[0].table_identity,
        epoch=newest.epoch,
        run=newest.run,
        holder=answers[0].holder,
        clock=max(shard.clock for shard in shards),
        horizon=horizon,
        rows_stored=sum(shard.rows_stored for shard in shards),
        disk_bytes=sum(shard.disk_bytes for shard in shards),
        shards=shards,
    )
