"""Search of a shard's stored rows: reads them chunk by chunk, each in a snapshot of its own, and keeps the k best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.blocks import RowBuffer
from weightserver.core.sharding import TouchedBlocks
from weightserver.core.similarity import NearestRows
from weightserver.core.spec import TableSpec
from weightserver.shard.reading import RawRows, ReadAt, check_rows
from weightserver.shard.table import Table
from weightserver.storage.interface import NEWEST, Storage, Transaction
from weightserver.storage.records import read_state

_CHUNK_BYTES = 2 << 20
"""Bytes of the weights that are compared together."""
_MAX_CHUNK_ROWS = 4_096
_MAX_SEEN_BLOCKS = 10_000
"""Number of blocks inspected in one snapshot: 20 ms."""


@dataclass(frozen=True)
class Query:
    """What is searched for."""

    vectors: Float32Array  # (q, D), finite
    k: int
    similarity: str
    """One of `SIMILARITIES`."""


@dataclass(frozen=True)
class Found:
    """The result of a search of some blocks."""

    rows: Int64Array  # (q, n)
    similarity: Float32Array  # (q, n)
    next_block: int | None
    """The block to continue at; None after the last one."""
    num_rows: int
    """Number of rows searched."""


@dataclass(frozen=True)
class Chunk:
    """Stored rows that were read in one snapshot."""

    rows: Int64Array  # (n,), ascending
    found: RawRows
    next_block: int | None


def rows_per_chunk(spec: TableSpec) -> int:
    """The most rows of a chunk."""
    return max(spec.rows_per_block, min(_MAX_CHUNK_ROWS, _CHUNK_BYTES // (4 * spec.dim)))


def search(
    chunks: Iterator[Chunk], query: Query, correct: Callable[[Chunk], None], may_continue: Callable[[], bool]
) -> Found:
    """Searches at least one chunk, and further ones while `may_continue`, asked after each.

    Args:
        correct: brings the rows of a chunk to the wanted step, in place.
    """
    nearest, next_block = NearestRows(query.vectors, query.k, query.similarity), None
    for chunk in chunks:
        correct(chunk)
        nearest.add(chunk.rows, chunk.found.buffer.widened_weight())
        next_block = chunk.next_block
        if not may_continue():
            break
    return Found(*nearest.found(), next_block, nearest.num_rows)


def read_chunks(
    storage: Storage, table: Table, at: ReadAt, first: int, *, num_shards: int, verify: bool, weight_only: bool
) -> Iterator[Chunk]:
    """The stored rows of the blocks from number `first` on, ascending; at least one chunk, which may be empty.

    Args:
        verify: whether to check the checksums of the rows.
        weight_only: whether momentum buffers and last steps are left out; their values are undefined then.

    Raises:
        NoTableError: there is no such checkpoint.
        StorageError: a row is damaged, or the header of a block.
    """
    block: int | None = first
    while block is not None:
        with storage.read() as txn:
            chunk = _read_chunk(txn, table, at, block, num_shards=num_shards, verify=verify, weight_only=weight_only)
        yield chunk
        block = chunk.next_block


def _read_chunk(
    txn: Transaction, table: Table, at: ReadAt, first: int, *, num_shards: int, verify: bool, weight_only: bool
) -> Chunk:
    codec, rows_per_block = table.codec, table.spec.rows_per_block
    up_to, end = _limits(txn, table, at)
    num_wanted = rows_per_chunk(table.spec) // rows_per_block
    found: list[tuple[int, memoryview, Int64Array]] = []
    block = txn.next_block(first)
    if block is not None:
        txn.prefetch(range(block, block + num_wanted * num_shards, num_shards), up_to=up_to)
    for _ in range(_MAX_SEEN_BLOCKS):  # includes blocks that are newer than the checkpoint
        if block is not None and block >= end:
            block = None
        if block is None or len(found) == num_wanted:
            break
        stored = txn.newest_block(block, up_to=up_to)
        if stored is not None:
            written = codec.written(stored)
            if len(written):
                found.append((block, stored, written))
            elif verify:  # what is stored has written rows
                codec.check(block, stored, written)
        block = txn.next_block(block + 1)
    blocks = [stored for _, stored, _ in found]
    touched = _touched(table, [number for number, _, _ in found], [written for _, _, written in found])
    if verify:  # with the roots, which prove which rows were written
        check_rows(table, touched, [*blocks])
    buffer = RowBuffer(codec, len(touched.rows))
    copy = buffer.copy_weight if weight_only else buffer.copy
    for run, stored in zip(touched.runs(), blocks, strict=True):
        copy(run.part, stored, run.slots)
    return Chunk(touched.rows, RawRows(buffer, all(map(codec.is_small, blocks))), block)


def _touched(table: Table, blocks: list[int], slots: list[Int64Array]) -> TouchedBlocks:
    """Rows by their blocks, ascending, and some slots of each."""
    numbers, counts = np.array(blocks, np.int64), np.array([len(some) for some in slots], np.int64)
    all_slots = np.concatenate(slots) if slots else np.zeros(0, np.int64)
    rows = np.repeat(numbers, counts) * table.spec.rows_per_block + all_slots
    return TouchedBlocks(rows, all_slots, numbers, np.append(0, np.cumsum(counts)))


def _limits(txn: Transaction, table: Table, at: ReadAt) -> tuple[int, float]:
    """The newest generation to read, and the end of its blocks. Raises NoTableError if there is no such checkpoint."""
    if at.checkpoint is None:
        return NEWEST, math.inf
    kept = read_state(txn).checkpoint(at.checkpoint, at.checkpoint_id)
    return kept.generation, replace(table.spec, num_rows=kept.num_rows or table.spec.num_rows).num_blocks
