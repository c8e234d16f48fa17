"""Writes to a shard's blocks: each block that a write touches is read, changed, sealed and stored once."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import dataclass, replace

import numpy as np

from weightserver.core import kernel
from weightserver.core.arrays import Int64Array, StoredArray
from weightserver.core.blocks import Buffer, RowBuffer
from weightserver.core.correction import apply_push
from weightserver.core.errors import StepError
from weightserver.core.exactly_once import WriterState
from weightserver.core.precision import MOMENTUM_BUFFER, WEIGHT
from weightserver.core.sharding import TouchedBlocks, touched_blocks
from weightserver.core.versions import Version, new_write_id
from weightserver.shard.rates import GivenRates
from weightserver.shard.reading import places
from weightserver.shard.sessions import check_epoch
from weightserver.shard.table import Table
from weightserver.shard.transaction import WriteHeader, WriteTransaction
from weightserver.storage.interface import Blocks
from weightserver.storage.records import append_schedule, get_record, put_record

_BLOCKS_AT_A_TIME = 1_000
_BYTES_AT_A_TIME = 4 << 20
"""Blocks that are changed together: many blocks of few rows take no longer than few of many."""


def admit(batch: WriteTransaction, header: WriteHeader) -> bool:
    """Records the write as applied; returns False for a duplicate.

    Raises:
        NoTableError: there is no table.
        FencedError: its session was superseded, or the write itself by a later one of its writer.
    """
    batch.require_table()
    check_epoch(batch.state, header.epoch, header.session_id)
    if _writer_state(batch, header.writer).has_applied(header.sequence):
        return False
    put_record(batch.txn, "writers", header.writer, WriterState(header.sequence, applied=True).pack())
    return True


def seal(batch: WriteTransaction, writer: bytes, sequence: int) -> bool:
    """Ensures that a write is not applied any more; returns whether it was."""
    if (known := _writer_state(batch, writer)) == WriterState(sequence, applied=False):
        return False
    if known.has_applied(sequence):
        return True
    put_record(batch.txn, "writers", writer, WriterState(sequence, applied=False).pack())
    return False


def _writer_state(batch: WriteTransaction, writer: bytes) -> WriterState:
    return WriterState.unpack(get_record(batch.txn, "writers", writer))


def use_rates(batch: WriteTransaction, given: GivenRates, num_steps: int) -> Table:
    """Stores the learning rates of the first `num_steps` steps, as a write gives them; returns the table with them.

    Raises:
        StepError, TableMismatchError: the write gives fewer, or others than were used.
        MissingRatesError: the shard lacks some that it does not give.
    """
    table = batch.require_table()
    used = table.rates
    given.require(num_steps)
    rates = used.named(given.up_to(num_steps), batch.ahead)
    if num_steps > len(used):
        new = rates.hashed.values[len(used) : num_steps]
        append_schedule(batch.txn, len(used), new)
        table = batch.table = table.with_rates(rates if len(rates) == num_steps else used.followed_by(new))
    return table


def update_rows(
    batch: WriteTransaction, table: Table, rows: Int64Array, clock: int, update: Push | Replacement
) -> None:
    """Runs `update` on all `rows`, the rows of some blocks at a time.

    Args:
        clock: the number of steps whose learning rates the write uses; the shard's clock is at least this afterwards.
    """
    rows_stored, first, write_id = 0, 0, new_write_id()
    most = max(1, min(_BLOCKS_AT_A_TIME, _BYTES_AT_A_TIME // table.codec.num_bytes))
    room = np.empty(min(most, len(rows)) * table.codec.num_bytes, np.uint8).data
    for many in touched_blocks(rows, table.spec.rows_per_block):
        for touched in many.split(most):
            if batch.is_cancelled():  # the transaction is undone, including the write's number: it may be sent again
                raise CancelledError
            part = slice(first, first + len(touched.rows))
            stored = batch.txn.newest_blocks(touched.blocks)
            blocks, num_new = _changed_by_kernel(
                table, touched, stored, update, part, room, write_id
            ) or _changed_by_numpy(table, touched, stored, update, part, write_id)
            for number, block in zip(touched.blocks.tolist(), blocks, strict=True):
                batch.txn.put_block(Version(number, batch.state.generation, write_id), block)
                if batch.state.generation:
                    batch.delete_unneeded(number)
            rows_stored += num_new
            first = part.stop
    batch.note_rows()
    state = batch.state
    batch.state = replace(
        state,
        clock=max(state.clock, clock),
        rows_stored=state.rows_stored + rows_stored,
        written=state.generation if len(rows) else state.written,
    )


def _changed_by_kernel(
    table: Table,
    touched: TouchedBlocks,
    stored: Blocks,
    update: Push | Replacement,
    part: slice,
    room: memoryview,
    write_id: int,
) -> tuple[list[Buffer], int] | None:
    """The changed and sealed blocks, and how many rows were never written before; None if NumPy has to decide.

    Args:
        room: memory for the blocks, used again for each part of a write, so that it stays in the cache.
    """
    compiled, codec = kernel.compiled(), table.codec
    if compiled is None:
        return None
    num_blocks, size = len(touched.blocks), codec.num_bytes
    where, last_step = places(codec, touched, stored), np.empty(len(touched.rows), np.int64)
    if compiled.look(where, False, last_step) >= 0 or (given := update.for_kernel(last_step, part)) is None:
        return None
    rows_stored = compiled.change(where, write_id, room[: num_blocks * size], given)
    if rows_stored < 0:
        return None
    return [room[start : start + size] for start in range(0, num_blocks * size, size)], rows_stored


def _changed_by_numpy(
    table: Table, touched: TouchedBlocks, stored: Blocks, update: Push | Replacement, part: slice, write_id: int
) -> tuple[list[Buffer], int]:
    """Applies an update by NumPy: the reference, which every other implementation has to equal.

    Raises:
        DamagedBlockError: a stored block is damaged.
        StepError: see `Push.change`.
    """
    codec, rows_stored = table.codec, 0
    blocks, rows = list[bytearray](), RowBuffer(codec, len(touched.rows))
    for run, block, made_by in zip(touched.runs(), stored.contents, stored.write_ids.tolist(), strict=True):
        if block is None:
            blocks.append(codec.initial(run.block))
        else:
            blocks.append(bytearray(block))
            codec.check(run.block, made_by, blocks[-1])  # all of it: bytes read wrongly would be stored for good
        rows.copy(run.part, memoryview(blocks[-1]), run.slots)
    update.change(rows, part)
    for run, block, changed in zip(touched.runs(), stored.contents, blocks, strict=True):
        rows.store(run.part, changed, run.slots)
        rows_stored += codec.mark_written(changed, touched.slots[run.part])
        codec.seal(run.block, write_id, changed, None if block is None else run.slots)
    return list[Buffer](blocks), rows_stored


@dataclass(frozen=True)
class Push:
    """The update of rows (int64 [n]) by `gradients` ([n, D], in the table's dtype) at `step`, computed in float32."""

    table: Table
    step: int
    rows: Int64Array
    gradients: StoredArray

    def change(self, stored: RowBuffer, part: slice) -> None:
        """Changes rows as they are stored, which are at `part` of the request, by NumPy: the definition. Raises
        StepError."""
        table, rows = self.table, self.rows[part]
        precision = table.codec.precision
        last_step, weight = stored.last_step, precision.widened(stored.weight)
        momentum = precision.widened(stored.momentum_buffer)
        gradients = precision.widened(self.gradients[part])
        correction = bool(table.spec.correction)
        apply_push(table.schedule, correction, self.step, last_step, weight, momentum, gradients, rows=rows)
        stored.weight = precision.rounded(weight, rows, last_step, WEIGHT)
        stored.momentum_buffer = precision.rounded(momentum, rows, last_step, MOMENTUM_BUFFER)

    def for_kernel(self, last_step: Int64Array, part: slice) -> kernel.Gradients | None:
        """Gradients for the kernel; None where `change` has to decide: for rows that saw later updates.

        Args:
            last_step: of the stored rows, int64 [n], not checked yet.
        """
        table, schedule, coefficients = self.table, self.table.schedule, None
        if last_step.min() < 0 or last_step.max() > self.step:
            return None
        if table.spec.correction and last_step.min() < self.step:
            coefficients = schedule.coefficients(last_step, self.step)
        rates = (schedule.weight_decay, schedule.momentum, float(schedule.learning_rates[self.step]))
        return _contiguous(self.gradients[part], table), coefficients, rates, self.step


@dataclass(frozen=True)
class Replacement:
    """Replaces rows (int64 [n]) by raw state, never by an older one: weight and momentum_buffer [n, D] in the table's
    dtype, last_step int64 [n]."""

    table: Table
    rows: Int64Array
    weight: StoredArray
    momentum_buffer: StoredArray
    last_step: Int64Array

    def change(self, stored: RowBuffer, part: slice) -> None:
        """See `Push.change`."""
        older = self.last_step[part] < stored.last_step
        if older.any():
            row, seen = self.rows[part][older][0], stored.last_step[older][0]
            raise StepError(
                f"row {row} has seen {seen} updates, the state to write only {self.last_step[part][older][0]}: "
                "an older state never replaces a newer one",
                row=int(row),
            )
        stored.last_step = self.last_step[part]
        stored.weight, stored.momentum_buffer = self.weight[part], self.momentum_buffer[part]

    def for_kernel(self, last_step: Int64Array, part: slice) -> kernel.RawRows | None:
        """See `Push.for_kernel`. An older state is left to `change`."""
        new_step = np.ascontiguousarray(self.last_step[part], np.int64)
        if (new_step < last_step).any():
            return None
        weight, momentum_buffer = (
            _contiguous(values[part], self.table) for values in (self.weight, self.momentum_buffer)
        )
        return weight, momentum_buffer, new_step


def _contiguous(values: StoredArray, table: Table) -> StoredArray:
    return np.ascontiguousarray(values, table.codec.precision.dtype)
