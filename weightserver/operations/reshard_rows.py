"""Writes the rows of old shards' blocks into those of a new shard, and compares them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
import xxhash

from weightserver.core.arrays import Int64Array
from weightserver.core.blocks import Block, BlockCodec, Buffer
from weightserver.core.errors import StorageError
from weightserver.core.sharding import Sharding
from weightserver.core.spec import TableSpec
from weightserver.core.versions import Version, new_write_id
from weightserver.storage.shard_builder import ShardBuilder, StoredBlock

OldBlock = tuple[int, Buffer]
"""A block's number and content."""


@dataclass
class RowsDigest:
    """The number and a digest of rows with their state, in any order."""

    num_rows: int = 0
    digest: int = 0

    def add(self, rows: Int64Array, state: Block) -> None:
        """Adds rows (int64 [n]) and their state."""
        columns = (rows, state.last_step, state.weight, state.momentum_buffer)
        as_bytes = [np.ascontiguousarray(column).view(np.uint8).reshape(len(rows), -1) for column in columns]
        hashes = map(xxhash.xxh3_64_intdigest, np.concatenate(as_bytes, axis=1))
        self.num_rows, self.digest = self.num_rows + len(rows), (self.digest + sum(hashes)) % 2**64


def _written(codec: BlockCodec, block: int, content: Buffer) -> tuple[Int64Array, Block]:
    """The rows of a stored block that were ever written, and their state."""
    slots, stored = codec.written(content), codec.views(content)
    return block * len(stored.last_step) + slots, _rows_at(stored, slots)


def _rows_at(block: Block, slots: Int64Array) -> Block:
    return Block(block.last_step[slots], block.weight[slots], block.momentum_buffer[slots])


def _rows_by_block(
    sources: Iterable[Iterator[OldBlock]], codec: BlockCodec, rows_per_block: int
) -> Iterator[tuple[int, Int64Array, Block]]:
    """Yields all written rows of the old shards, ascending, with the number of their new block and their state."""
    for number, content in heapq.merge(*sources, key=itemgetter(0)):
        rows, state = _written(codec, number, content)
        blocks = rows // rows_per_block
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(blocks)) + 1):
            if len(part):
                yield int(blocks[part[0]]), rows[part], _rows_at(state, part)


def fill(sources: Iterable[Iterator[OldBlock]], builder: ShardBuilder, old: TableSpec, new: TableSpec) -> RowsDigest:
    """Writes the rows of a new shard, unless it is finished; returns a digest of them.

    Args:
        sources: the blocks of each old shard, ascending: at least those with rows of the new one.
    """
    sharding, codec, write_id = Sharding(new.rows_per_block, builder.num_shards), BlockCodec(new), new_write_id()
    digest, rows_by_block = RowsDigest(), _rows_by_block(sources, BlockCodec(old), new.rows_per_block)
    for number, parts in itertools.groupby(rows_by_block, key=itemgetter(0)):
        if sharding.shard_of_block(number) != builder.shard:
            continue
        block = codec.initial(number)
        for _, rows, state in parts:
            slots = rows - number * new.rows_per_block
            for values, given in zip(codec.views(block), state, strict=True):
                values[slots] = given
            codec.mark_written(block, slots)
            digest.add(rows, state)
        codec.seal(number, write_id, block)
        builder.add(Version(number, 0, write_id), block)
    return digest


def compare(directory: Path, codec: BlockCodec, expected: RowsDigest, blocks: Iterator[StoredBlock]) -> None:
    """Raises StorageError unless a new shard holds the expected rows."""
    found = RowsDigest()
    for number, content in blocks:
        found.add(*_written(codec, number, content))
    if found != expected:
        raise StorageError(f"{directory} holds rows that are not those of the old shards: remove it and start again")
