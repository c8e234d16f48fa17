"""Writes to a shard's blocks: each block that a write touches is read, changed, sealed and stored once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace

from weightserver.core.arrays import Int64Array, StoredArray
from weightserver.core.blocks import RowBuffer
from weightserver.core.correction import apply_push
from weightserver.core.errors import StepError
from weightserver.core.exactly_once import WriterState
from weightserver.core.precision import MOMENTUM_BUFFER, WEIGHT
from weightserver.core.sharding import BlockRun, block_runs
from weightserver.core.versions import unneeded
from weightserver.shard.sessions import check_epoch
from weightserver.shard.table import Table
from weightserver.shard.transaction import WriteHeader, WriteTransaction
from weightserver.storage.records import get_record, put_record

_RUNS_AT_A_TIME = 1_000
_BYTES_AT_A_TIME = 4 << 20
"""Blocks that are changed together: many blocks of few rows take no longer than few of many."""
Update = Callable[[RowBuffer, slice], None]
"""Changes rows, as they are stored, that are at `slice` of the request."""


def admit(batch: WriteTransaction, header: WriteHeader) -> bool:
    """Fences writers of other sessions; returns False for a duplicate."""
    check_epoch(batch.state, header.epoch, header.opener)
    stored = get_record(batch.txn, "writers", header.writer)
    writer = WriterState.unpack(stored)
    admitted = writer.admit(header.sequence, header.settled_before)
    if writer.pack() != stored:  # a duplicate too may say which writes its writer has abandoned
        put_record(batch.txn, "writers", header.writer, writer.pack())
    return admitted


def update_rows(
    batch: WriteTransaction, table: Table, header: WriteHeader, rows: Int64Array, clock: int, update: Update
) -> bool:
    """Runs `update` on all `rows`, the rows of some blocks at a time; returns False if the write is a duplicate.

    Args:
        clock: the number of steps whose learning rates the write uses; the shard's clock is at least this afterwards.
    """
    if not admit(batch, header):
        return False
    batch.schedule.require_known(header.schedule, clock)
    rows_stored = 0
    most = max(1, min(_RUNS_AT_A_TIME, _BYTES_AT_A_TIME // table.codec.num_bytes))
    runs = block_runs(rows, table.spec.rows_per_block)
    while some := list(itertools.islice(runs, most)):
        rows_stored += _update_blocks(batch, table, some, rows, update)
    state = batch.state
    batch.state = replace(state, clock=max(state.clock, clock), rows_stored=state.rows_stored + rows_stored)
    return True


def _update_blocks(
    batch: WriteTransaction, table: Table, runs: list[BlockRun], rows: Int64Array, update: Update
) -> int:
    """Changes the rows of these runs and stores their blocks; returns how many were never written before."""
    codec, first, rows_stored = table.codec, runs[0].part.start, 0
    blocks, changed = [], RowBuffer(codec, runs[-1].part.stop - first)
    batch.txn.prefetch([run.block for run in runs])
    for run in runs:
        if batch.is_cancelled():  # the transaction is undone, including the write's number: it may be sent again
            raise CancelledError
        block = _block_to_change(batch, table, run.block)
        changed.copy(slice(run.part.start - first, run.part.stop - first), memoryview(block), run.slots)
        blocks.append(block)
    update(changed, slice(first, runs[-1].part.stop))
    for run, block in zip(runs, blocks, strict=True):
        if batch.is_cancelled():
            raise CancelledError
        changed.store(slice(run.part.start - first, run.part.stop - first), block, run.slots)
        rows_stored += codec.mark_written(block, rows[run.part] - run.block * table.spec.rows_per_block)
        codec.seal(run.block, block)
        batch.txn.put_block(run.block, batch.state.generation, block)
        if batch.state.generation:
            delete_unneeded(batch, run.block)
    return rows_stored


def _block_to_change(batch: WriteTransaction, table: Table, number: int) -> bytearray:
    """A copy of the newest version of a block, or a new block."""
    stored = batch.txn.newest_block(number)
    if stored is None:
        return table.codec.initial(number)
    table.codec.check(number, stored)  # a new seal would hide the damage
    return bytearray(stored)


def push(table: Table, step: int, rows: Int64Array, gradients: StoredArray) -> Update:
    """The update of rows (int64 [n]) by `gradients` ([n, D], in the table's dtype) at `step`, computed in float32."""
    precision = table.codec.precision

    def update(stored: RowBuffer, part: slice) -> None:
        last_step, weight = stored.last_step, precision.widened(stored.weight)
        momentum = precision.widened(stored.momentum_buffer)
        apply_push(
            table.schedule,
            bool(table.spec.correction),
            step,
            last_step,
            weight,
            momentum,
            precision.widened(gradients[part]),
            rows=rows[part],
        )
        stored.weight = precision.rounded(weight, rows[part], last_step, WEIGHT)
        stored.momentum_buffer = precision.rounded(momentum, rows[part], last_step, MOMENTUM_BUFFER)

    return update


def replacement(rows: Int64Array, weight: StoredArray, momentum_buffer: StoredArray, last_step: Int64Array) -> Update:
    """Replaces rows (int64 [n]) by raw state, never by an older one: weight and momentum_buffer [n, D] in the table's
    dtype, last_step int64 [n]."""

    def update(stored: RowBuffer, part: slice) -> None:
        older = last_step[part] < stored.last_step
        if older.any():
            row, seen = rows[part][older][0], stored.last_step[older][0]
            raise StepError(
                f"row {row} has seen {seen} updates, the state to write only {last_step[part][older][0]}: "
                "an older state never replaces a newer one"
            )
        stored.last_step = last_step[part]
        stored.weight, stored.momentum_buffer = weight[part], momentum_buffer[part]

    return update


def delete_unneeded(batch: WriteTransaction, block: int) -> None:
    """Deletes the versions of a block that neither the newest state nor a checkpoint needs."""
    for generation in unneeded(batch.txn.generations(block), batch.state.checkpoints):
        batch.txn.delete_block(block, generation)
