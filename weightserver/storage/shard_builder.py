"""Builds a shard's directory from other data, for `restore` and `reshard`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightserver.common.closing import Closing
from weightserver.core.arrays import Float32Array
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import Checkpoint, ShardCheckpoint, backup_name
from weightserver.core.errors import StorageError
from weightserver.core.lineage import Lineage
from weightserver.core.spec import TableSpec
from weightserver.core.versions import Version, newest
from weightserver.storage.directory import remove_access
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

StoredBlock = tuple[int, memoryview]
"""A block's number, and its content, which lives as long as its snapshot."""
BATCH_BYTES = 16 << 20
"""Bytes of blocks that are written in one transaction."""


@dataclass(frozen=True)
class TableState:
    """The state in which the shards of a new cluster begin, besides their rows."""

    spec: TableSpec
    learning_rates: Float32Array
    """The learning rates of the steps below the checkpoint's, float32 [step]."""
    epoch: int
    """The newest session's; all writes are refused until a newer one is opened."""
    run: str
    checkpoint: Checkpoint
    """The checkpoint whose rows these are, and under which the new shards keep them."""
    identity: bytes
    """Identity of the table."""
    lineage: Lineage
    """Lineage of the source shards, up to the checkpoint."""
    is_backed_up: bool = False
    """Whether the new shards keep the checkpoint for its backup too, as the other shards do."""


def _checked_blocks(txn: Transaction, spec: TableSpec, *, rows_stored: int) -> Iterator[StoredBlock]:
    """Every block, ascending.

    Raises:
        StorageError: a block is damaged; or, at the end, they do not hold `rows_stored` rows that were ever written.
    """
    codec, num_rows = BlockCodec(spec), 0
    for version in newest(txn.versions()):
        content = txn.content(version)
        codec.check(version.block, version.write_id, content)
        num_rows += codec.num_written(content)
        yield version.block, content
    if num_rows != rows_stored:
        raise StorageError(
            f"{txn.directory} holds {num_rows} of the {rows_stored} rows that were written: remove it, and repeat the "
            "command"
        )


def _read(blocks: Iterator[StoredBlock]) -> None:
    for _ in blocks:
        pass


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
        self.num_shards = num_shards
        self._waiting: list[tuple[Version, bytes | bytearray]] = []
        self._origin = {**origin, "shard": shard, "num_shards": num_shards}
        self._storage = LmdbStorage(directory, allow_recreate=True)
        try:
            with self._storage.write() as txn:
                self._begin(txn)
            remove_access(directory)
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
        write_identity(txn, ShardIdentity(self.shard, self.num_shards, unfinished=True))
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

    def finish(
        self, table: TableState, *, rows_stored: int, compare: Callable[[Iterator[StoredBlock]], object] = _read
    ) -> None:
        """Reads all blocks back, and makes the directory ready to be served.

        Args:
            compare: takes all blocks; may raise, and then the directory stays unfinished.

        Raises:
            StorageError: a block is damaged, or the number of rows is not `rows_stored`.
        """
        self.flush()
        with self._storage.write() as txn:
            txn.check_contents()
            compare(_checked_blocks(txn, table.spec, rows_stored=rows_stored))
            write_spec(txn, table.spec, table.identity)
            write_lineage(txn, table.lineage)
            write_peers(txn, [])
            append_schedule(txn, 0, table.learning_rates)
            write_state(txn, _first_state(table, rows_stored))
            write_identity(txn, ShardIdentity(self.shard, self.num_shards))
        self.finished = True

    def close(self) -> None:
        self._storage.close()


def _first_state(table: TableState, rows_stored: int) -> State:
    """The state of a new shard, which keeps its rows under the checkpoint that they come from."""
    kept, incarnation = table.checkpoint, os.urandom(8).hex()
    copied = ShardCheckpoint(
        kept.name,
        kept.step,
        kept.checkpoint_id,
        (f"{incarnation}:0",),
        generation=0,
        rows_stored=rows_stored,
        num_rows=table.spec.num_rows,
    )
    checkpoints: tuple[ShardCheckpoint, ...] = (copied,)
    if table.is_backed_up and kept.name != backup_name(kept):
        checkpoints += (replace(copied, name=backup_name(kept)),)
    return State(
        epoch=table.epoch,
        run=table.run,
        clock=kept.step,
        rows_stored=rows_stored,
        generation=1,
        incarnation=incarnation,
        timeline=kept.checkpoint_id.hex(),
        checkpoints=checkpoints,
    )
