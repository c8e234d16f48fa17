"""Reads of a shard's blocks: chunks of rows for fetches, and whole blocks of a checkpoint for backups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightserver.core import kernel
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.blocks import BlockCodec, RowBuffer
from weightserver.core.correction import correct, require_finite
from weightserver.core.errors import DamagedBlockError, InvalidRequestError, StepError
from weightserver.core.precision import MOMENTUM_BUFFER, WEIGHT
from weightserver.core.sharding import TouchedBlocks, touched_blocks
from weightserver.core.versions import Version, by_block, digest, newest
from weightserver.protocol.codec import CHUNK_BYTES, encode_fetch_response, field_head
from weightserver.shard.table import Table
from weightserver.storage.interface import Blocks, Storage, Transaction
from weightserver.storage.records import read_lineage, read_state

READ_BYTES = 4 << 20
"""Bytes of blocks in one answer of `read_blocks`."""
_MAX_SEEN_BLOCKS = 50_000
"""Number of blocks inspected for one answer of `read_blocks`: a snapshot of some 100 ms."""


def places(codec: BlockCodec, touched: TouchedBlocks, blocks: Blocks) -> kernel.Places:
    """These rows for the compiled kernel."""
    return codec.compiled, blocks.contents, touched.blocks, blocks.write_ids, touched.starts, touched.slots


@dataclass(frozen=True)
class SnapshotRows:
    """Rows in a snapshot's own memory; valid as long as the snapshot."""

    touched: TouchedBlocks
    blocks: Blocks
    last_step: Int64Array  # (n,)

    def answer(self, table: Table, step: int | None, *, state: bool) -> bytes:
        """The FetchResponse with the weights before update `step`, or as they are stored; with `state` all of the rows.

        Raises:
            StepError: a row has seen that update, or is infinite or NaN when corrected to it.
        """
        last_step, coefficients = self.last_step, None
        if step is not None:
            _require_unseen(step, self.touched.rows, last_step)
            if table.spec.correction:
                coefficients = table.schedule.coefficients(last_step, step)
            last_step = np.full_like(last_step, step)
        message = self._by_kernel(table, step or 0, coefficients, last_step, state=state)
        if message is None:  # NumPy says which row is infinite or NaN
            message = self._by_numpy(table, step or 0, coefficients, last_step, state=state)
        return message

    def _by_numpy(
        self, table: Table, step: int, coefficients: Float32Array | None, last_step: Int64Array, *, state: bool
    ) -> bytes:
        """The answer by NumPy: the definition."""
        found, rows, precision = self._copied(table), self.touched.rows, table.codec.precision
        if coefficients is not None:
            weight, momentum_buffer = precision.widened(found.weight), precision.widened(found.momentum_buffer)
            correct(weight, momentum_buffer, coefficients, weight_only=not state)
            require_finite(rows, step - 1, *([weight, momentum_buffer] if state else [weight]))
            found.weight = precision.rounded(weight, rows, step, WEIGHT)
            if state:
                found.momentum_buffer = precision.rounded(momentum_buffer, rows, step, MOMENTUM_BUFFER)
        arrays = (found.weight, found.momentum_buffer, last_step) if state else (found.weight, None, None)
        return encode_fetch_response(*arrays)

    def _copied(self, table: Table) -> RowBuffer:
        """The rows as they are stored."""
        found = RowBuffer(table.codec, len(self.touched.rows))
        absent: list[slice] = []  # rows that were never written, neighbours together
        for (_, slots, part), stored in zip(self.touched.runs(), self.blocks.contents, strict=True):
            if stored is None:
                start = absent.pop().start if absent and absent[-1].stop == part.start else part.start
                absent.append(slice(start, part.stop))
            else:
                found.copy(part, stored, slots)
        for part in absent:
            found.weight[part] = table.codec.initial_weight(self.touched.rows[part])
            found.momentum_buffer[part] = 0
        return found

    def _by_kernel(
        self, table: Table, step: int, coefficients: Float32Array | None, last_step: Int64Array, *, state: bool
    ) -> bytes | None:
        """The answer by the kernel; None without it, or if a corrected row is infinite or NaN."""
        codec, touched = table.codec, self.touched
        if (compiled := kernel.compiled()) is None:
            return None
        num_rows = len(touched.rows)
        values = table.spec.value_bytes * table.spec.dim * num_rows
        weight, momentum_buffer, steps = field_head(1, values), field_head(2, values), field_head(3, 8 * num_rows)
        heads = (weight, momentum_buffer, steps) if state else (weight, None, None)
        return compiled.answer(places(codec, touched, self.blocks), coefficients, step, heads, last_step)


def chunks(rows: Int64Array, table: Table) -> Iterator[TouchedBlocks]:
    """The blocks that `rows` (int64 [n]) touch, in parts of about 1 MiB of weights."""
    spec = table.spec
    return touched_blocks(rows, spec.rows_per_block, max(1, CHUNK_BYTES // (spec.value_bytes * spec.dim)))


def read_rows(txn: Transaction, table: Table, touched: TouchedBlocks, *, up_to: int) -> SnapshotRows:
    """Reads the rows of one chunk.

    Args:
        up_to: the newest generation to read.

    Raises:
        DamagedBlockError: one of the rows is damaged, or the header of its block.
    """
    blocks = txn.newest_blocks(touched.blocks, up_to=up_to)
    compiled, codec, last_step = kernel.compiled(), table.codec, np.zeros(len(touched.rows), np.int64)
    if compiled is None:
        for run, block, made_by in zip(touched.runs(), blocks.contents, blocks.write_ids.tolist(), strict=True):
            if block is not None:
                codec.check(run.block, made_by, block, run.slots)
                last_step[run.part] = codec.views(block).last_step[run.slots]
        return SnapshotRows(touched, blocks, last_step)
    bad = compiled.look(places(codec, touched, blocks), True, last_step)
    if bad >= 0:
        block, number, made_by = blocks.contents[bad], int(touched.blocks[bad]), int(blocks.write_ids[bad])
        assert block is not None
        codec.check(number, made_by, block, touched.slots[touched.starts[bad] : touched.starts[bad + 1]])
        raise DamagedBlockError(f"{codec.name(number)} changed while it was read")
    return SnapshotRows(touched, blocks, last_step)


def _require_unseen(step: int, rows: Int64Array, last_step: Int64Array) -> None:
    """Raises StepError if one of `rows` has seen update `step`."""
    if last_step.max(initial=0) > step:
        first = int((last_step > step).argmax())
        raise StepError(
            f"row {rows[first]} has seen {last_step[first]} updates, its state before update {step} is gone: "
            f"fetch it for step {last_step[first]} or later",
            row=int(rows[first]),
            step=step,
        )


@dataclass(frozen=True)
class CheckpointBlocks:
    """Some of a checkpoint's stored blocks, ascending."""

    blocks: list[tuple[Version, bytes]]
    next_block: int | None
    """Where to continue; None after the last block of the table as it was at the checkpoint."""
    digest: bytes = b""
    """The digest of all the checkpoint's versions, see `core.versions`; only where no more blocks follow."""
    lineage: Sequence[str] = ()
    """The marks that the checkpoint descends from, its own included; only there too."""


def read_blocks(
    storage: Storage, table: Table, first: int, *, checkpoint: str, since: str = "", is_needed: Callable[[int], bool]
) -> CheckpointBlocks:
    """A checkpoint's stored blocks from number `first` on, about 4 MiB of them.

    Args:
        since: a checkpoint that is not later: only blocks that were written after it are read. Empty for all.
        is_needed: whether to read a block, by its number.

    Raises:
        NoTableError: there is no such checkpoint.
        InvalidRequestError: `since` is the later one.
        StorageError: a block is damaged, or, where no more follow, the shard has lost some.
    """
    num_wanted, wanted, next_block = max(1, READ_BYTES // table.codec.num_bytes), list[Version](), None
    with storage.read() as txn:
        state = read_state(txn)
        kept, before = state.checkpoint(checkpoint), state.checkpoint(since).generation if since else -1
        if before > kept.generation:
            raise InvalidRequestError(f"checkpoint {since!r} is later than {checkpoint!r}: name an earlier one")

        def is_wanted(version: Version) -> bool:
            return version.generation > before and is_needed(version.block)

        end = replace(table.spec, num_rows=kept.num_rows).num_blocks
        for seen, (block, versions) in enumerate(by_block(txn.versions(first))):
            if block >= end:
                break
            if len(wanted) == num_wanted or seen == _MAX_SEEN_BLOCKS:
                next_block = block
                break
            wanted += filter(is_wanted, newest(versions, kept.generation))  # none if all are newer
        blocks = txn.newest_blocks(np.array([version.block for version in wanted], np.int64), up_to=kept.generation)
        found = list[tuple[Version, bytes]]()
        for version, content in zip(wanted, blocks.contents, strict=True):
            assert content is not None
            table.codec.check(version.block, version.write_id, content)
            found.append((version, bytes(content)))
        if found or next_block is not None:
            return CheckpointBlocks(found, next_block)
        txn.check_contents()
        known = itertools.takewhile(lambda version: version.block < end, newest(txn.versions(), kept.generation))
        named = digest((version.block, version.write_id) for version in filter(is_wanted, known))
        return CheckpointBlocks(found, None, named, read_lineage(txn).up_to(kept.mark).marks)
