"""Writes to a shard's blocks: each block that a write touches is read, changed, sealed and stored once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace

from weightserver.core.arrays import Int64Array, StoredArray
from weightserver.core.blocks import Block
from weightserver.core.correction import apply_push
from weightserver.core.errors import StepError
from weightserver.core.exactly_once import WriterState
from weightserver.core.precision import MOMENTUM_BUFFER, WEIGHT
from weightserver.core.sharding import BlockRun, block_runs
from weightserver.core.versions import unneeded
from weightserver.shard.sessions import check_epoch
from weightserver.shard.table import Table
from weightserver.shard.transaction import WriteHeader, WriteTransaction
from weightserver.storage.interface import Transaction
from weightserver.storage.records import get_record, put_record

_RUNS_AT_A_TIME = 1_000
Update = Callable[[Block, BlockRun], None]
"""Changes the rows of a run in their block."""


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
    """Runs `update` once on each block that `rows` touch; returns False if the write is a duplicate.

    Args:
        clock: the number of steps whose learning rates the write uses; the shard's clock is at least this afterwards.
    """
    if not admit(batch, header):
        return False
    batch.schedule.require_known(header.schedule, clock)
    rows_stored = 0
    for run in _prefetched(block_runs(rows, table.spec.rows_per_block), batch.txn):
        if batch.is_cancelled():  # the transaction is undone, including the write's number: it may be sent again
            raise CancelledError
        stored = batch.txn.newest_block(run.block)
        if stored is None:
            buffer = table.codec.initial(run.block)
        else:
            table.codec.check(run.block, stored)  # a new seal would hide the damage
            buffer = bytearray(stored)
        update(table.codec.views(buffer), run)
        rows_stored += table.codec.mark_written(buffer, rows[run.part] - run.block * table.spec.rows_per_block)
        table.codec.seal(run.block, buffer)
        batch.txn.put_block(run.block, batch.state.generation, buffer)
        if batch.state.generation:
            delete_unneeded(batch, run.block)
    state = batch.state
    batch.state = replace(state, clock=max(state.clock, clock), rows_stored=state.rows_stored + rows_stored)
    return True


def push(table: Table, step: int, rows: Int64Array, gradients: StoredArray) -> Update:
    """The update of rows (int64 [n]) by `gradients` ([n, D], in the table's dtype) at `step`, computed in float32."""
    precision = table.codec.precision

    def update(stored: Block, run: BlockRun) -> None:
        last_step, weight = stored.last_step[run.slots], precision.widened(stored.weight[run.slots])
        momentum = precision.widened(stored.momentum_buffer[run.slots])
        apply_push(
            table.schedule,
            bool(table.spec.correction),
            step,
            last_step,
            weight,
            momentum,
            precision.widened(gradients[run.part]),
            rows=rows[run.part],
        )
        stored.last_step[run.slots] = last_step
        stored.weight[run.slots] = precision.rounded(weight, rows[run.part], last_step, WEIGHT)
        stored.momentum_buffer[run.slots] = precision.rounded(momentum, rows[run.part], last_step, MOMENTUM_BUFFER)

    return update


def replacement(rows: Int64Array, weight: StoredArray, momentum_buffer: StoredArray, last_step: Int64Array) -> Update:
    """Replaces rows (int64 [n]) by raw state, never by an older one: weight and momentum_buffer [n, D] in the table's
    dtype, last_step int64 [n]."""

    def update(stored: Block, run: BlockRun) -> None:
        older = last_step[run.part] < stored.last_step[run.slots]
        if older.any():
            row, seen = rows[run.part][older][0], stored.last_step[run.slots][older][0]
            raise StepError(
                f"row {row} has seen {seen} updates, the state to write only {last_step[run.part][older][0]}: "
                "an older state never replaces a newer one"
            )
        stored.last_step[run.slots] = last_step[run.part]
        stored.weight[run.slots] = weight[run.part]
        stored.momentum_buffer[run.slots] = momentum_buffer[run.part]

    return update


def delete_unneeded(batch: WriteTransaction, block: int) -> None:
    """Deletes the versions of a block that neither the newest state nor a checkpoint needs."""
    for generation in unneeded(batch.txn.generations(block), batch.state.checkpoints):
        batch.txn.delete_block(block, generation)


def _prefetched(runs: Iterator[BlockRun], txn: Transaction) -> Iterator[BlockRun]:
    """The same runs; their blocks are read from disk a thousand at a time."""
    while some := list(itertools.islice(runs, _RUNS_AT_A_TIME)):
        txn.prefetch([run.block for run in some])
        yield from some
