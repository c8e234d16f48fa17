"""Creates new shards from the directories of old ones, with another number of shards, another rows_per_block, or both.

The rows are those of one checkpoint, which the new shards keep under its name so that a trainer can resume from it, or
the current rows. Only rows that were ever written are read and written. The rows of each new shard are compared with
the old ones before it can be served.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from weightserver.common.atomic_files import to_path
from weightserver.core.arrays import Int64Array
from weightserver.core.blocks import Block, BlockCodec
from weightserver.core.errors import StorageError
from weightserver.core.sharding import Sharding
from weightserver.core.spec import TableSpec
from weightserver.core.versions import Version, new_write_id
from weightserver.operations.arguments import non_empty_name
from weightserver.operations.reshard_sources import (
    SourceShard,
    common_spec,
    open_source,
    require_one_time,
    table_state,
)
from weightserver.storage.shard_builder import ShardBuilder, StoredBlock, TableState

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
    and no checkpoint. Sessions and writers are not carried over: open a new session afterwards. An interrupted call may
    be repeated.

    Raises:
        ValueError: the sources are not all shards of one table, or a target holds something else.
        NoTableError: the checkpoint does not exist.
        StorageError: a directory is damaged or in use.
    """
    if len({path.resolve() for path in [*sources, *targets]}) < len(sources) + len(targets):
        raise ValueError("a directory is given twice")
    for target, source in itertools.product(targets, sources):
        if target.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"{target} lies in {source}, an old shard's directory: give one beside it")
    with ExitStack() as stack:
        shards = [open_source(directory, stack) for directory in sources]
        old = common_spec(shards)
        if current:
            require_one_time(shards)
        new = old if rows_per_block is None else replace(old, rows_per_block=rows_per_block)
        table = table_state(shards, new, checkpoint, current)
        if table.checkpoint is not None:
            shards = [replace(shard, checkpoint=table.checkpoint.name) for shard in shards]
        origin = _origin(shards, table, len(targets))
        builders = [
            stack.enter_context(ShardBuilder(directory, shard=shard, num_shards=len(targets), origin=origin))
            for shard, directory in enumerate(targets)
        ]
        digests = _fill(shards, builders, old, new)
        for builder, digest in zip(builders, digests, strict=True):
            if not builder.finished:  # it may have been served since
                compare = partial(_compare, builder.directory, BlockCodec(new), digest)
                builder.finish(table, rows_stored=digest.num_rows, compare=compare)
    rows_stored = sum(digest.num_rows for digest in digests)
    _log.info("compared all %(rows)d rows", {"rows": rows_stored})
    kept = table.checkpoint
    name, step = (kept.name, kept.step) if kept else (None, table.clock)
    newest = max(shard.state.clock for shard in shards)
    return Resharded(new, rows_stored, name, step, left_behind=max(0, newest - table.clock))


def _origin(shards: list[SourceShard], table: TableState, num_targets: int) -> dict[str, Any]:
    """Identifies what the new shards are made from."""
    kept = table.checkpoint
    return {
        "states": [shard.state.mark for shard in sorted(shards, key=lambda shard: shard.identity.shard)],
        "spec": asdict(table.spec),
        "num_shards": num_targets,
        "checkpoint": kept and [kept.name, kept.step, kept.checkpoint_id.hex()],
    }


@dataclass
class _RowsDigest:
    """The number and a digest of rows with their state, in any order."""

    num_rows: int = 0
    digest: int = 0

    def add(self, rows: Int64Array, state: Block) -> None:
        """Adds rows (int64 [n]) and their state."""
        columns = (rows, state.last_step, state.weight, state.momentum_buffer)
        as_bytes = [np.ascontiguousarray(column).view(np.uint8).reshape(len(rows), -1) for column in columns]
        hashes = map(xxhash.xxh3_64_intdigest, np.concatenate(as_bytes, axis=1))
        self.num_rows, self.digest = self.num_rows + len(rows), (self.digest + sum(hashes)) % 2**64


def _written(codec: BlockCodec, block: int, content: memoryview) -> tuple[Int64Array, Block]:
    """The rows of a stored block that were ever written, and their state."""
    slots, stored = codec.written(content), codec.views(content)
    return block * len(stored.last_step) + slots, _rows_at(stored, slots)


def _rows_at(block: Block, slots: Int64Array) -> Block:
    return Block(block.last_step[slots], block.weight[slots], block.momentum_buffer[slots])


def _rows_by_block(
    shards: list[SourceShard], codec: BlockCodec, rows_per_block: int
) -> Iterator[tuple[int, Int64Array, Block]]:
    """Yields all written rows of the old shards, ascending, with the number of their new block and their state."""
    for number, content in heapq.merge(*(shard.blocks() for shard in shards), key=itemgetter(0)):
        rows, state = _written(codec, number, content)
        blocks = rows // rows_per_block
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(blocks)) + 1):
            if len(part):
                yield int(blocks[part[0]]), rows[part], _rows_at(state, part)


def _fill(shards: list[SourceShard], builders: list[ShardBuilder], old: TableSpec, new: TableSpec) -> list[_RowsDigest]:
    """Writes all rows to the new shards that are not finished; returns a digest of the rows of each new shard."""
    sharding, codec, write_id = Sharding(new.rows_per_block, len(builders)), BlockCodec(new), new_write_id()
    digests = [_RowsDigest() for _ in builders]
    rows_by_block = _rows_by_block(shards, BlockCodec(old), new.rows_per_block)
    for number, parts in itertools.groupby(rows_by_block, key=itemgetter(0)):
        block, target = codec.initial(number), sharding.shard_of_block(number)
        for _, rows, state in parts:
            slots = rows - number * new.rows_per_block
            for values, given in zip(codec.views(block), state, strict=True):
                values[slots] = given
            codec.mark_written(block, slots)
            digests[target].add(rows, state)
        codec.seal(number, write_id, block)
        builders[target].add(Version(number, 0, write_id), block)
    return digests


def _compare(directory: Path, codec: BlockCodec, expected: _RowsDigest, blocks: Iterator[StoredBlock]) -> None:
    """Raises StorageError unless a new shard holds the expected rows."""
    found = _RowsDigest()
    for number, content in blocks:
        found.add(*_written(codec, number, content))
    if found != expected:
        raise StorageError(
            f"{directory} holds rows that are not those of the old shards: remove the new directories and start again"
        )


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
