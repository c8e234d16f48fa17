"""Builds a shard's directory from other data, for `restore` and `reshard`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightserver.common.closing import Closing
from weightserver.core.arrays import Float32Array
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import Checkpoint, ShardCheckpoint
from weightserver.core.errors import StorageError
from weightserver.core.lineage import Lineage
from weightserver.core.sharding import Sharding
from weightserver.core.spec import TableSpec
from weightserver.core.versions import Version
from weightserver.storage.interface import DATABASES, Transaction
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import (
    ShardIdentity,
    State,
    append_schedule,
    get_json,
    put_json,
    read_identity,
    write_identity,
    write_lineage,
    write_peers,
    write_spec,
    write_state,
)

BATCH_BYTES = 16 << 20
"""Bytes of blocks that are written in one transaction."""


@dataclass(frozen=True)
class TableState:
    """The state in which the shards of a new cluster begin, besides their rows."""

    spec: TableSpec
    learning_rates: Float32Array
    """Those of the steps below the clock, float32 [clock]."""
    epoch: int
    """The newest session's; all writes are refused until a newer one is opened."""
    run: str
    clock: int
    checkpoint: Checkpoint | None
    """The checkpoint under which the new shards keep the rows."""
    identity: bytes
    """Identity of the table."""
    timeline: str
    lineage: Lineage = field(default_factory=Lineage)
    """Lineage of the source shards, up to the state that the rows hold completely."""


class ShardBuilder(Closing):
    """Fills a new directory with the blocks of one shard; a context manager.

    `serve` refuses the directory until it is finished. A build that was killed starts over; one that had finished, from
    the same source, is recognised (`finished`).

    Args:
        origin: identifies the source of the blocks, as JSON.

    Raises:
        ValueError, StorageError: the directory holds anything else, or another process uses it.
    """

    def __init__(self, directory: Path, *, shard: int, num_shards: int, origin: dict[str, Any]) -> None:
        self.directory = directory
        self.shard = shard
        self._num_shards = num_shards
        self._waiting: list[tuple[Version, bytes | bytearray]] = []
        self._origin = {**origin, "shard": shard, "num_shards": num_shards}
        self._storage = LmdbStorage(directory, allow_recreate=True)
        try:
            with self._storage.write() as txn:
                self._begin(txn)
        except BaseException:
            self.close()
            raise

    def _begin(self, txn: Transaction) -> None:
        identity = read_identity(txn)
        self.finished = identity is not None and not identity.unfinished
        if self.finished and get_json(txn, "origin") == self._origin:
            return
        if self.finished:
            raise StorageError(f"{self.directory} holds a shard's data: give another directory")
        for database in DATABASES:
            txn.clear(database)
        write_identity(txn, ShardIdentity(self.shard, self._num_shards, unfinished=True))
        put_json(txn, "origin", self._origin)

    def add(self, version: Version, content: bytes | bytearray) -> None:
        """Stores a sealed block, many in one transaction; they come in ascending order. Does nothing if finished."""
        if not self.finished:
            self._waiting.append((version, content))
            if len(self._waiting) * len(content) >= BATCH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Stores the blocks that were added."""
        if self._waiting:
            with self._storage.write() as txn:
                for version, content in self._waiting:
                    txn.put_block(version, content)
            self._waiting.clear()

    def read(self) -> AbstractContextManager[Transaction]:
        """A snapshot of what is stored."""
        return self._storage.read()

    def finish(self, table: TableState, *, rows_stored: int) -> None:
        """Reads all blocks back, and makes the directory ready to be served.

        Raises:
            StorageError: a block is damaged or belongs to another shard, or the number of rows is not `rows_stored`.
        """
        self.flush()
        with self._storage.write() as txn:
            txn.check_contents()
            num_found = self._check_blocks(txn, table.spec)
            if num_found != rows_stored:
                raise StorageError(
                    f"{self.directory} holds {num_found} rows, not {rows_stored}: remove it and start over"
                )
            write_spec(txn, table.spec, table.identity)
            write_lineage(txn, table.lineage)
            write_peers(txn, [])
            append_schedule(txn, 0, table.learning_rates)
            write_state(txn, _first_state(table, rows_stored))
            write_identity(txn, ShardIdentity(self.shard, self._num_shards))
        self.finished = True

    def _check_blocks(self, txn: Transaction, spec: TableSpec) -> int:
        """Checks every block; returns the number of rows that were ever written."""
        codec, sharding = BlockCodec(spec), Sharding(spec.rows_per_block, self._num_shards)
        num_written = 0
        for version in txn.versions():
            content = txn.content(version)
            codec.check(version.block, version.write_id, content)
            if sharding.shard_of_block(version.block) != self.shard:
                raise StorageError(f"{self.directory}: block {version.block} belongs to another shard")
            num_written += codec.num_written(content)
        return num_written

    def close(self) -> None:
        self._storage.close()


def _first_state(table: TableState, rows_stored: int) -> State:
    """The state of a new shard, which keeps its rows under the checkpoint they come from, if any."""
    incarnation = os.urandom(8).hex()
    checkpoints: tuple[ShardCheckpoint, ...] = ()
    if (kept := table.checkpoint) is not None:
        copied = ShardCheckpoint(
            kept.name,
            kept.step,
            kept.checkpoint_id,
            (f"{incarnation}:0",),
            generation=0,
            rows_stored=rows_stored,
            num_rows=table.spec.num_rows,
        )
        checkpoints = (copied,)
    return State(
        epoch=table.epoch,
        run=table.run,
        clock=table.clock,
        rows_stored=rows_stored,
        generation=len(checkpoints),
        incarnation=incarnation,
        timeline=table.timeline,
        checkpoints=checkpoints,
    )
