"""Reads of a shard's blocks: chunks of rows for fetches, and whole blocks of a checkpoint for backups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from weightserver.core.arrays import Int64Array, StoredArray
from weightserver.core.blocks import SMALL, RowBuffer
from weightserver.core.correction import bring_to
from weightserver.core.errors import StepError
from weightserver.core.precision import MOMENTUM_BUFFER, WEIGHT
from weightserver.core.sharding import BlockRun, block_runs
from weightserver.protocol.codec import CHUNK_BYTES
from weightserver.shard.table import Table
from weightserver.storage.interface import NEWEST, Storage, Transaction
from weightserver.storage.records import read_state

READ_BYTES = 4 << 20
"""Bytes of blocks in one answer of `read_blocks`."""
_MOST_STANDARD_DEVIATIONS = 10
"""No initial weight lies beyond so many."""
_MAX_SEEN_BLOCKS = 50_000
"""Number of blocks inspected for one answer of `read_blocks`: a snapshot of some 100 ms."""


@dataclass(frozen=True)
class Rows:
    """Rows as a fetch answers them, in the table's dtype; momentum_buffer and last_step only if they were asked for."""

    weight: StoredArray  # (n, D)
    momentum_buffer: StoredArray | None = None  # (n, D)
    last_step: Int64Array | None = None  # (n,)


@dataclass(frozen=True)
class ReadAt:
    """The state that rows are read in: the newest one, or that of a checkpoint."""

    checkpoint: str | None = None
    checkpoint_id: bytes = b""

    def generation(self, txn: Transaction) -> int:
        """The newest generation to read. Raises NoTableError if there is no such checkpoint."""
        if self.checkpoint is None:
            return NEWEST
        return read_state(txn).checkpoint(self.checkpoint, self.checkpoint_id).generation


@dataclass
class RawRows:
    """Rows as they are stored."""

    buffer: RowBuffer
    all_small: bool
    """Whether no value is beyond ±`SMALL`."""

    def answer(self, *, state: bool) -> Rows:
        """The weights, and with `state` the momentum buffers and last steps too."""
        buffer = self.buffer
        return Rows(buffer.weight, buffer.momentum_buffer, buffer.last_step) if state else Rows(buffer.weight)


def chunks(rows: Int64Array, table: Table) -> Iterator[list[BlockRun]]:
    """The blocks that `rows` (int64 [n]) touch, in lists of about 1 MiB of weights."""
    rows_per_chunk = max(1, CHUNK_BYTES // (table.spec.value_bytes * table.spec.dim))
    runs: list[BlockRun] = []
    for run in block_runs(rows, table.spec.rows_per_block):
        runs.append(run)
        if run.part.stop - runs[0].part.start >= rows_per_chunk:
            yield runs
            runs = []
    if runs:
        yield runs


def read_rows(
    storage: Storage, table: Table, at: ReadAt, rows: Int64Array, runs: list[BlockRun], *, verify: bool
) -> RawRows:
    """Reads the rows of one chunk in one snapshot.

    Args:
        rows: the rows of the chunk, int64 [n].
        verify: whether to check the checksums of the blocks.
    """
    first = runs[0].part.start
    found = RowBuffer(table.codec, len(rows))
    absent: list[slice] = []  # rows that were never written, neighbours together
    all_small = _MOST_STANDARD_DEVIATIONS * table.spec.init_std <= SMALL
    with storage.read() as txn:
        up_to = at.generation(txn)
        txn.prefetch([run.block for run in runs], up_to=up_to)
        for block, slots, run in runs:
            part = slice(run.start - first, run.stop - first)
            stored = txn.newest_block(block, up_to=up_to)
            if stored is None:
                start = absent.pop().start if absent and absent[-1].stop == part.start else part.start
                absent.append(slice(start, part.stop))
            else:
                if verify:
                    table.codec.check(block, stored)
                all_small &= table.codec.is_small(stored)
                found.copy(part, stored, slots)
    for part in absent:
        found.weight[part] = table.codec.initial_weight(rows[part])
        found.momentum_buffer[part] = 0
    return RawRows(found, all_small)


def correct_rows(table: Table, step: int, rows: Int64Array, found: RawRows, *, weight_only: bool) -> None:
    """Brings raw rows to their state before update `step`, in place, rounded as that state would be stored.

    Raises:
        StepError: a row has seen that update, or SGD makes it infinite or NaN before it.
    """
    buffer = found.buffer
    if buffer.last_step.max(initial=0) > step:
        first = int((buffer.last_step > step).argmax())
        raise StepError(
            f"row {rows[first]} has seen {buffer.last_step[first]} updates, its state before update {step} is gone: "
            f"fetch it for step {buffer.last_step[first]} or later"
        )
    if table.spec.correction:
        precision = table.codec.precision
        weight, momentum_buffer = precision.widened(buffer.weight), precision.widened(buffer.momentum_buffer)
        bring_to(
            table.schedule,
            step,
            buffer.last_step,
            weight,
            momentum_buffer,
            weight_only=weight_only,
            rows=rows,
            largest=SMALL if found.all_small else math.inf,
        )
        buffer.weight = precision.rounded(weight, rows, step, WEIGHT)
        if not weight_only:
            buffer.momentum_buffer = precision.rounded(momentum_buffer, rows, step, MOMENTUM_BUFFER)
    buffer.last_step[:] = step


def read_blocks(
    storage: Storage, table: Table, first: int, *, num_shards: int, checkpoint: str
) -> tuple[list[tuple[int, bytes]], int | None]:
    """A checkpoint's stored blocks from number `first` on, ascending, about 4 MiB of them; and the number to continue
    at, None after the last block of the table as it was at the checkpoint.

    Raises:
        NoTableError: there is no such checkpoint.
        StorageError: a block is damaged.
    """
    spec, codec = table.spec, table.codec
    num_wanted = max(1, READ_BYTES // codec.num_bytes)
    found: list[tuple[int, bytes]] = []
    with storage.read() as txn:
        kept = read_state(txn).checkpoint(checkpoint)
        up_to, end = kept.generation, replace(spec, num_rows=kept.num_rows or spec.num_rows).num_blocks
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
                codec.check(block, stored)
                found.append((block, bytes(stored)))
            block = txn.next_block(block + 1)
    return found, block
