"""New shards from old ones that nobody serves: another number of them, another rows_per_block, or both.

The rows are those of one checkpoint, which the new shards keep under its name, so that a trainer goes on from it; or
those of now. Only rows that were ever written are read and written. What was done is recorded in the new directories
(see building.py), and all of it is compared with the old ones before any can be served.
"""

from __future__ import annotations

import heapq
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path

import numpy as np
import xxhash

from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.blocks import Block, BlockCodec
from weightserver.core.checkpoints import chosen_checkpoint, common_checkpoints
from weightserver.core.errors import StorageError
from weightserver.core.lineage import Lineage
from weightserver.core.sharding import BlockRun, Sharding, block_runs
from weightserver.core.spec import TableSpec
from weightserver.storage.integrity import check_integrity
from weightserver.storage.interface import NEWEST, Transaction
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import (
    State,
    descends,
    read_identity,
    read_lineage,
    read_peers,
    read_schedule,
    read_spec,
    read_state,
    read_table_identity,
    state_to_json,
)
from weightserver.storage.shard_builder import BATCH_BYTES, ShardBuilder, TableState
from weightserver.storage.tombstone import require_current

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
    """Later updates, which stay in the old shards alone."""


@dataclass(frozen=True)
class _Source:
    """One old shard, and which of its rows to take."""

    directory: Path
    shard: int
    num_shards: int
    spec: TableSpec
    table_identity: bytes
    state: State
    lineage: Lineage
    peers: list[str]
    learning_rates: Float32Array
    txn: Transaction
    rows_stored: int
    up_to: int = NEWEST

    def blocks(self, first: int, codec: BlockCodec) -> Iterator[tuple[int, memoryview]]:
        """Stored blocks from number `first` on, ascending, checked."""
        block = self.txn.next_block(first)
        while block is not None:
            content = self.txn.newest_block(block, up_to=self.up_to)
            if content is not None:
                codec.check(block, content)
                yield block, content
            block = self.txn.next_block(block + 1)


def reshard(
    sources: Sequence[Path],
    targets: Sequence[Path],
    *,
    rows_per_block: int | None = None,
    checkpoint: str | None = None,
    current: bool = False,
) -> Resharded:
    """Fills the new directories `targets`, one for each new shard in their order, from those of all old shards.

    Takes the rows of `checkpoint`, by default of the newest that all old shards keep; with `current` the rows of now,
    without any checkpoint. Sessions and writers stay behind: a new session has to be opened. One that was stopped goes
    on when it is called again with the same.

    Raises:
        ValueError: these are not all shards of one table, or targets that hold anything else.
        NoTableError: there is no such checkpoint.
        StorageError: damage, or a directory that is in use.
    """
    if len({path.resolve() for path in [*sources, *targets]}) < len(sources) + len(targets):
        raise ValueError("a directory is given twice")
    with ExitStack() as stack:
        shards = [_open(directory, stack) for directory in sources]
        spec = _check_complete(shards, current)
        new = spec if rows_per_block is None else replace(spec, rows_per_block=rows_per_block)
        table = _table_state(shards, new, checkpoint, current)
        if (kept := table.checkpoint) is not None:
            shards = [
                replace(shard, up_to=known.generation, rows_stored=known.rows_stored)
                for shard in shards
                for known in [shard.state.checkpoint(kept.name)]
            ]
        origin = {
            "states": [_digest(shard.state) for shard in sorted(shards, key=lambda shard: shard.shard)],
            "spec": asdict(new),
            "num_shards": len(targets),
            "checkpoint": kept and [kept.name, kept.step, kept.checkpoint_id.hex()],
        }
        builders = [
            stack.enter_context(ShardBuilder(directory, shard=shard, num_shards=len(targets), origin=origin))
            for shard, directory in enumerate(targets)
        ]
        work = _Resharding(shards, builders, spec, new)
        if not any(builder.finished for builder in builders):  # they are finished when all are full and compared
            work.fill()
        counts = work.compare()
        for builder, count in zip(builders, counts, strict=True):
            if not builder.finished:
                builder.finish(table, rows_stored=count)
    kept_name, step = (kept.name, kept.step) if kept else (None, table.clock)
    newest = max(shard.state.clock for shard in shards)
    return Resharded(new, sum(counts), kept_name, step, left_behind=max(0, newest - table.clock))


# ---- the old shards


def _open(directory: Path, stack: ExitStack) -> _Source:
    """A snapshot of a directory that nobody else serves meanwhile."""
    check_integrity(directory)
    storage = stack.enter_context(closing(LmdbStorage(directory, readonly=True)))
    require_current(directory)
    txn = stack.enter_context(storage.read())
    identity = read_identity(txn)
    spec = None if identity is None or identity.unfinished else read_spec(txn)
    if identity is None or spec is None:
        raise ValueError(f"{directory} holds no table: give the directories of all shards of one")
    state = read_state(txn)
    return _Source(
        directory,
        identity.shard,
        identity.num_shards,
        spec,
        read_table_identity(txn),
        state,
        read_lineage(txn),
        read_peers(txn),
        read_schedule(txn),
        txn,
        state.rows_stored,
    )


def _check_complete(shards: list[_Source], current: bool) -> TableSpec:
    """The spec of their table; ValueError unless they are all of its shards, each once."""
    first = shards[0]
    for shard in shards:
        if shard.spec.is_another_size_of(first.spec):
            raise ValueError(
                f"{first.directory} and {shard.directory} hold tables of {first.spec.num_rows} and "
                f"{shard.spec.num_rows} rows, as after an extend_table() that failed halfway: serve them and repeat "
                "'weightserver extend'"
            )
        if shard.spec != first.spec or shard.table_identity != first.table_identity:
            raise ValueError(f"{first.directory} and {shard.directory} hold different tables: give those of one")
        if shard.num_shards != len(shards):
            raise ValueError(
                f"{shard.directory} is of a cluster of {shard.num_shards} shards, {len(shards)} were given: give all"
            )
    if len({shard.shard for shard in shards}) < len(shards):
        raise ValueError(f"two directories hold the same shard of {len(shards)}: give each once")
    if current:
        _require_one_time(shards)
    return first.spec


def _require_one_time(shards: list[_Source]) -> None:
    """Raises ValueError where the newest rows of the shards are known to be of different times."""
    remedy = "their rows are not of one time: take a checkpoint's"
    epochs = {shard.state.epoch for shard in shards}
    if len(epochs) > 1:
        raise ValueError(f"the shards are of sessions {sorted(epochs)}, {remedy}")
    first = shards[0]
    for shard in shards:
        if shard.state.opener != first.state.opener or shard.state.timeline != first.state.timeline:
            raise ValueError(
                f"{first.directory} and {shard.directory} were not opened, rolled back or restored together, {remedy}"
            )
    by_number = {shard.shard: shard for shard in shards}
    for shard in shards:
        for number, mark in enumerate(shard.peers):
            other = by_number[number]
            if mark and not descends(other.state, other.lineage, mark):
                raise ValueError(
                    f"{other.directory} is older than {shard.directory}, which knows of later writes of shard "
                    f"{number}: give its newest directory, or take a checkpoint's rows"
                )


def _table_state(shards: list[_Source], spec: TableSpec, checkpoint: str | None, current: bool) -> TableState:
    """What the new shards begin with."""
    states = [shard.state for shard in shards]
    newest = max(states, key=lambda state: state.epoch)
    kept = None
    clock = max(state.clock for state in states)
    if not current:
        kept = chosen_checkpoint(checkpoint, common_checkpoints([state.checkpoints for state in states]))
        clock = max(state.checkpoint(kept.name).clock for state in states)
    longest = max((shard.learning_rates for shard in shards), key=len)
    for shard in shards:
        if not np.array_equal(longest[: len(shard.learning_rates)], shard.learning_rates):
            raise ValueError(f"{shard.directory} has another schedule than the others: extend it on all shards again")
    version = 1 + max(state.schedule_version for state in states)
    marks = [state.checkpoint(kept.name).mark if kept else state.mark for state in states]
    return TableState(
        spec,
        longest,
        epoch=newest.epoch,
        run=newest.run,
        clock=clock,
        schedule_version=version,
        checkpoint=kept,
        identity=shards[0].table_identity,
        timeline=kept.checkpoint_id.hex() if kept else states[0].timeline,
        lineage=Lineage().joined(
            mark for shard, up_to in zip(shards, marks, strict=True) for mark in shard.lineage.up_to(up_to).marks
        ),
    )


def _digest(state: State) -> str:
    """Recognises what a shard holds: it changes with every write, and holds what its session's opener drew by lot."""
    return xxhash.xxh3_128_hexdigest(json.dumps(state_to_json(state), sort_keys=True).encode())


# ---- the new ones


@dataclass(frozen=True)
class _Resharding:
    """Old shards and the new ones made from them."""

    shards: list[_Source]
    builders: list[ShardBuilder]
    old: TableSpec
    new: TableSpec

    @property
    def _sharding(self) -> Sharding:
        return Sharding(self.new.rows_per_block, len(self.builders))

    def fill(self) -> None:
        """Writes all blocks that are not there yet."""
        waiting: list[list[tuple[int, bytearray]]] = [[] for _ in self.builders]
        num_bytes = 0

        def write(next_block: int) -> None:
            for builder, blocks in zip(self.builders, waiting, strict=True):
                builder.add(blocks, next_block=next_block)
                blocks.clear()

        first = min(builder.next_block for builder in self.builders)
        _log.info("blocks %d to %d are to be written", first, self.new.num_blocks)
        for number, block in self._converted(first):
            waiting[self._sharding.shard_of_block(number)].append((number, block))
            num_bytes += len(block)
            if num_bytes >= BATCH_BYTES:
                write(number + 1)
                num_bytes = 0
        write(self.new.num_blocks)

    def _converted(self, first: int) -> Iterator[tuple[int, bytearray]]:
        """The new blocks from number `first` on that hold a row that was ever written: ascending, sealed."""
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
        """Looks up every row that was ever written in the new shards that are not finished, and counts those of all.

        Raises:
            StorageError: a row is missing or differs.
        """
        codec, counts = BlockCodec(self.old), [0] * len(self.builders)
        with ExitStack() as stack:
            made = [stack.enter_context(builder.read()) for builder in self.builders]
            for shard in self.shards:
                num_found = 0
                for block, content in shard.blocks(0, codec):
                    slots = codec.written(content)
                    num_found += len(slots)
                    stored = _taken(codec.views(content), slots)
                    for run in block_runs(block * self.old.rows_per_block + slots, self.new.rows_per_block):
                        where = self._sharding.shard_of_block(run.block)
                        counts[where] += run.part.stop - run.part.start
                        if self.builders[where].finished:  # it may have been served since
                            continue
                        if not self._holds(made[where].newest_block(run.block), run, _taken(stored, run.part)):
                            raise StorageError(
                                f"{self.builders[where].directory}: block {run.block} is not what {shard.directory} "
                                "holds: remove the new directories and begin anew"
                            )
                if num_found != shard.rows_stored:
                    raise StorageError(
                        f"{shard.directory} holds {num_found} rows of the {shard.rows_stored} that were written: "
                        "restore it from a backup, and remove the new directories"
                    )
        _log.info("all %d rows were compared", sum(counts))
        return counts

    def _holds(self, found: memoryview | None, run: BlockRun, rows: Block) -> bool:
        """Whether a new block has these rows where they belong, and marks them as written."""
        if found is None:
            return False
        target = BlockCodec(self.new)
        there = _taken(target.views(found), run.slots)
        return bool(
            np.array_equal(there.last_step, rows.last_step)
            and np.array_equal(there.weight, rows.weight)
            and np.array_equal(there.momentum_buffer, rows.momentum_buffer)
            and np.isin(np.arange(self.new.rows_per_block)[run.slots], target.written(found)).all()
        )


def _taken(block: Block, slots: slice | Int64Array) -> Block:
    """Some of its rows."""
    return Block(block.last_step[slots], block.weight[slots], block.momentum_buffer[slots])
