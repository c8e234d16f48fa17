"""Creates new shards from the directories of old ones, with another number of shards, another rows_per_block, or both.

The rows are those of one checkpoint, which the new shards keep under its name so that a trainer can resume from it, or
the current rows. Only rows that were ever written are read and written. The new directories record the progress (see
`storage.shard_builder`), and all rows are compared with the old ones before the new shards can be served.
"""

from __future__ import annotations

import argparse
import heapq
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from weightserver.common.atomic_files import to_path
from weightserver.core.arrays import Int64Array
from weightserver.core.blocks import Block, BlockCodec
from weightserver.core.errors import StorageError
from weightserver.core.sharding import BlockRun, Sharding, block_runs
from weightserver.core.spec import TableSpec
from weightserver.operations.arguments import non_empty_name
from weightserver.operations.reshard_sources import (
    SourceShard,
    common_spec,
    open_source,
    require_one_time,
    state_digest,
    table_state,
)
from weightserver.storage.interface import Transaction
from weightserver.storage.shard_builder import BATCH_BYTES, ShardBuilder, TableState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resharded:
    """What the new shards hold."""

    spec: TableSpec
    rows_stored: int
    checkpoint: str | None
    step: int
    """Finished updates that the rows hold."""
    left_behind: int
    """Later updates, which only the old shards hold."""


def reshard(
    sources: Sequence[Path],
    targets: Sequence[Path],
    *,
    rows_per_block: int | None = None,
    checkpoint: str | None = None,
    current: bool = False,
) -> Resharded:
    """Fills the new directories `targets`, one per new shard in order, from the directories of all old shards.

    Takes the rows of `checkpoint`, by default the newest that all old shards keep, or with `current` the current rows
    and no checkpoint. Sessions and writers are not carried over: open a new session afterwards. Repeating an
    interrupted call with the same arguments resumes it.

    Raises:
        ValueError: the sources are not all shards of one table, or a target holds something else.
        NoTableError: the checkpoint does not exist.
        StorageError: a directory is damaged or in use.
    """
    if len({path.resolve() for path in [*sources, *targets]}) < len(sources) + len(targets):
        raise ValueError("a directory is given twice")
    with ExitStack() as stack:
        shards = [open_source(directory, stack) for directory in sources]
        old = common_spec(shards)
        if current:
            require_one_time(shards)
        new = old if rows_per_block is None else replace(old, rows_per_block=rows_per_block)
        table = table_state(shards, new, checkpoint, current)
        if table.checkpoint is not None:
            shards = [shard.at_checkpoint(table.checkpoint.name) for shard in shards]
        origin = _origin(shards, table, len(targets))
        builders = [
            stack.enter_context(ShardBuilder(directory, shard=shard, num_shards=len(targets), origin=origin))
            for shard, directory in enumerate(targets)
        ]
        rows_stored = _Resharding(shards, builders, old, new).run(table)
    kept = table.checkpoint
    name, step = (kept.name, kept.step) if kept else (None, table.clock)
    newest = max(shard.state.clock for shard in shards)
    return Resharded(new, rows_stored, name, step, left_behind=max(0, newest - table.clock))


def _origin(shards: list[SourceShard], table: TableState, num_targets: int) -> dict[str, Any]:
    """Identifies what the new shards are made from; a build resumes only with the same origin."""
    kept = table.checkpoint
    return {
        "states": [state_digest(shard.state) for shard in sorted(shards, key=lambda shard: shard.shard)],
        "spec": asdict(table.spec),
        "num_shards": num_targets,
        "checkpoint": kept and [kept.name, kept.step, kept.checkpoint_id.hex()],
    }


@dataclass(frozen=True)
class _Resharding:
    """Copies rows from old shards to new ones."""

    shards: list[SourceShard]
    builders: list[ShardBuilder]
    old: TableSpec
    new: TableSpec

    @property
    def _sharding(self) -> Sharding:
        return Sharding(self.new.rows_per_block, len(self.builders))

    def run(self, table: TableState) -> int:
        """Fills, compares and finishes the new shards; returns the number of rows in all of them."""
        if not any(builder.finished for builder in self.builders):  # they are finished once all are full and compared
            self.fill()
        counts = self.compare()
        for builder, count in zip(self.builders, counts, strict=True):
            if not builder.finished:
                builder.finish(table, rows_stored=count)
        return sum(counts)

    def fill(self) -> None:
        """Writes all missing blocks."""
        waiting: list[list[tuple[int, bytearray]]] = [[] for _ in self.builders]
        num_bytes = 0

        def write(next_block: int) -> None:
            for builder, blocks in zip(self.builders, waiting, strict=True):
                builder.add(blocks, next_block=next_block)
                blocks.clear()

        first = min(builder.next_block for builder in self.builders)
        _log.info("writing blocks %(first)d to %(end)d", {"first": first, "end": self.new.num_blocks})
        for number, block in self._converted(first):
            waiting[self._sharding.shard_of_block(number)].append((number, block))
            num_bytes += len(block)
            if num_bytes >= BATCH_BYTES:
                write(number + 1)
                num_bytes = 0
        write(self.new.num_blocks)

    def _converted(self, first: int) -> Iterator[tuple[int, bytearray]]:
        """Yields the new blocks from number `first` that hold written rows, in ascending order, sealed."""
        codec, target = BlockCodec(self.old), BlockCodec(self.new)
        number, buffer = -1, bytearray()
        first_old = first * self.new.rows_per_block // self.old.rows_per_block
        for block, content in heapq.merge(
            *(shard.blocks(first_old, codec) for shard in self.shards), key=itemgetter(0)
        ):
            slots, stored = codec.written(content), codec.views(content)
            for run in block_runs(block * self.old.rows_per_block + slots, self.new.rows_per_block):
                if run.block < first:
                    continue
                if run.block != number:
                    if number >= 0:
                        target.seal(number, buffer)
                        yield number, buffer
                    number, buffer = run.block, target.initial(run.block)
                made, taken = target.views(buffer), slots[run.part]
                made.last_step[run.slots] = stored.last_step[taken]
                made.weight[run.slots] = stored.weight[taken]
                made.momentum_buffer[run.slots] = stored.momentum_buffer[taken]
                target.mark_written(buffer, np.arange(self.new.rows_per_block)[run.slots])
        if number >= 0:
            target.seal(number, buffer)
            yield number, buffer

    def compare(self) -> list[int]:
        """Looks up every written row in the new shards that are not finished; returns the number of rows in each shard.

        Raises:
            StorageError: a row is missing or differs.
        """
        counts = [0] * len(self.builders)
        with ExitStack() as stack:
            made = [stack.enter_context(builder.read()) for builder in self.builders]
            for shard in self.shards:
                before = sum(counts)
                self._compare_shard(shard, made, counts)
                if (num_found := sum(counts) - before) != shard.rows_stored:
                    raise StorageError(
                        f"{shard.directory} holds {num_found} of the {shard.rows_stored} rows that were written: "
                        "restore it from a backup, and remove the new directories"
                    )
        _log.info("compared all %(rows)d rows", {"rows": sum(counts)})
        return counts

    def _compare_shard(self, shard: SourceShard, made: list[Transaction], counts: list[int]) -> None:
        """Compares one old shard with the new ones, and adds its rows to their `counts`."""
        codec = BlockCodec(self.old)
        for block, content in shard.blocks(0, codec):
            slots = codec.written(content)
            stored = _rows_at(codec.views(content), slots)
            for run in block_runs(block * self.old.rows_per_block + slots, self.new.rows_per_block):
                target = self._sharding.shard_of_block(run.block)
                counts[target] += run.part.stop - run.part.start
                if self.builders[target].finished:  # it may have been served since
                    continue
                if not self._holds(made[target].newest_block(run.block), run, _rows_at(stored, run.part)):
                    raise StorageError(
                        f"{self.builders[target].directory}: block {run.block} differs from {shard.directory}: "
                        "remove the new directories and start again"
                    )

    def _holds(self, found: memoryview | None, run: BlockRun, rows: Block) -> bool:
        """Whether a new block holds these rows at their place and marks them as written."""
        if found is None:
            return False
        target = BlockCodec(self.new)
        there = _rows_at(target.views(found), run.slots)
        return bool(
            np.array_equal(there.last_step, rows.last_step)
            and np.array_equal(there.weight, rows.weight)
            and np.array_equal(there.momentum_buffer, rows.momentum_buffer)
            and np.isin(np.arange(self.new.rows_per_block)[run.slots], target.written(found)).all()
        )


def _rows_at(block: Block, slots: slice | Int64Array) -> Block:
    return Block(block.last_step[slots], block.weight[slots], block.momentum_buffer[slots])


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=to_path, nargs="+", required=True, help="the directories of all old shards")
    parser.add_argument("--target", type=to_path, nargs="+", required=True, help="new directories, of shards 0, 1, ...")
    parser.add_argument("--rows-per-block", type=int, help="rows per block of the new shards (default as before)")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--checkpoint",
        type=non_empty_name,
        help="the checkpoint whose rows to take and keep (default the newest of all shards)",
    )
    rows.add_argument("--current", action="store_true", help="take the current rows, and keep no checkpoint")


def run(arguments: argparse.Namespace) -> None:
    made = reshard(
        arguments.source,
        arguments.target,
        rows_per_block=arguments.rows_per_block,
        checkpoint=arguments.checkpoint,
        current=arguments.current,
    )
    what = f"checkpoint {made.checkpoint} (step {made.step})" if made.checkpoint else f"step {made.step}"
    print(
        f"{len(arguments.source)} shards became {len(arguments.target)} with {made.rows_stored} rows of {what}, "
        f"{made.spec.rows_per_block} per block; {made.left_behind} later updates remain only in the old shards"
    )
