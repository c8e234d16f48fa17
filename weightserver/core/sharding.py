"""Placement of rows: row -> block -> shard, and rows <-> ranges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weightserver.core.arrays import Int64Array

MAX_SHARDS = 2**31 - 1
"""The protocol's int32."""
_ROWS_AT_A_TIME = 1 << 16
"""Number of rows whose blocks are computed together: as Python integers they take 40 times a row's 8 bytes."""


@dataclass(frozen=True)
class Sharding:
    """Deals blocks of `rows_per_block` rows round-robin to `num_shards` shards."""

    rows_per_block: int
    num_shards: int

    def shard_of(self, rows: Int64Array) -> Int64Array:
        """The shard of each row, int64 [n]."""
        shards: Int64Array = (rows // self.rows_per_block) % self.num_shards
        return shards

    def shard_of_block(self, block: int) -> int:
        return block % self.num_shards

    def needs_block(self, shard: int, block: int, rows_per_block: int) -> bool:
        """Whether `shard` holds a row of block `block` of another layout, with `rows_per_block` rows in a block."""
        first = block * rows_per_block // self.rows_per_block
        last = ((block + 1) * rows_per_block - 1) // self.rows_per_block
        return (shard - first) % self.num_shards <= last - first

    def local(self, rows: Int64Array) -> Int64Array:
        """Each row's position among all the rows of its shard, int64 [n]."""
        positions: Int64Array = rows // (self.rows_per_block * self.num_shards) * self.rows_per_block
        positions += rows % self.rows_per_block
        return positions

    def rows_of_shard(self, shard: int, num_rows: int) -> Int64Array:
        """All rows of 0..num_rows-1 that `shard` holds, ascending, int64 [n]."""
        blocks = np.arange(shard, -(-num_rows // self.rows_per_block), self.num_shards, dtype=np.int64)
        rows = (blocks[:, None] * self.rows_per_block + np.arange(self.rows_per_block)).reshape(-1)
        return rows[rows < num_rows]

    def positions_by_shard(self, rows: Int64Array) -> dict[int, slice | Int64Array]:
        """The positions in `rows` (int64 [n]) of each shard's rows; shards without rows are left out."""
        if len(rows) == 0:
            return {}
        if self.num_shards == 1:
            return {0: slice(None)}
        shards = self.shard_of(rows)
        return {int(shard): np.flatnonzero(shards == shard) for shard in np.unique(shards)}


class BlockRun(NamedTuple):
    """The rows of a request that lie in one block."""

    block: int
    slots: slice | Int64Array  # their positions in the block; a slice if they are neighbours, which saves a copy
    part: slice  # their positions in the request


class TouchedBlocks(NamedTuple):
    """Some rows of a request, and the blocks that they lie in."""

    rows: Int64Array  # (n,), strictly increasing
    slots: Int64Array  # (n,), their positions in their blocks
    blocks: Int64Array  # (k,), each once, ascending
    starts: Int64Array  # (k + 1,): block number j of these has the rows from number starts[j] to starts[j + 1]

    def runs(self) -> Iterator[BlockRun]:
        """One run for each block."""
        starts, ends = self.starts[:-1], self.starts[1:]
        first = self.slots[starts]
        adjacent = self.slots[ends - 1] - first == ends - starts - 1
        for block, start, end, low, is_adjacent in zip(
            self.blocks.tolist(), starts.tolist(), ends.tolist(), first.tolist(), adjacent.tolist(), strict=True
        ):
            where = slice(low, low + end - start) if is_adjacent else self.slots[start:end]
            yield BlockRun(block, where, slice(start, end))

    def split(self, num_blocks: int) -> Iterator[TouchedBlocks]:
        """Splits the rows into parts of at most `num_blocks` blocks."""
        for first in range(0, len(self.blocks), num_blocks):
            starts = self.starts[first : first + num_blocks + 1]
            part = slice(starts[0], starts[-1])
            yield TouchedBlocks(
                self.rows[part], self.slots[part], self.blocks[first : first + num_blocks], starts - starts[0]
            )


def touched_blocks(rows: Int64Array, rows_per_block: int, num_rows: int = _ROWS_AT_A_TIME) -> Iterator[TouchedBlocks]:
    """Strictly increasing `rows` (int64 [n]) in parts of at least `num_rows`, each up to the end of a block."""
    start = 0
    while start < len(rows):
        last = rows[min(start + num_rows, len(rows)) - 1]
        end = int(np.searchsorted(rows, last - last % rows_per_block + rows_per_block))
        some = rows[start:end]
        blocks = some // rows_per_block
        starts = _with_ends(np.flatnonzero(blocks[1:] != blocks[:-1]), len(blocks))
        yield TouchedBlocks(some, some - blocks * rows_per_block, blocks[starts[:-1]], starts)
        start = end


def _with_ends(last: Int64Array, number: int) -> Int64Array:
    """Where runs of `number` (≥ 1) items start, and the end of the last one, given the last item of each other run."""
    starts = np.empty(len(last) + 2, np.int64)
    starts[0], starts[-1] = 0, number
    np.add(last, 1, out=starts[1:-1])
    return starts


def to_ranges(rows: Int64Array) -> Int64Array:
    """Strictly increasing `rows` (int64 [n]) as pairs (first, count), int64 [r, 2]."""
    if not len(rows):
        return np.empty((0, 2), np.int64)
    starts = _with_ends(np.flatnonzero(rows[1:] - rows[:-1] != 1), len(rows))
    ranges = np.empty((len(starts) - 1, 2), np.int64)
    ranges[:, 0] = rows[starts[:-1]]
    ranges[:, 1] = starts[1:] - starts[:-1]
    return ranges


def from_ranges(ranges: Int64Array) -> Int64Array:
    """The rows that pairs (first, count), int64 [r, 2], stand for: int64 [n]."""
    first, counts = ranges[:, 0], ranges[:, 1]
    ends = np.cumsum(counts)
    rows: Int64Array = np.repeat(first - (ends - counts), counts)
    rows += np.arange(len(rows))
    return rows
