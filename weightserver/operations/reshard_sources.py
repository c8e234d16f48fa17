"""The shards that `reshard` reads: snapshots of their directories, which nothing else may serve meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from weightserver.core.arrays import Float32Array
from weightserver.core.checkpoints import chosen_checkpoint, common_checkpoints
from weightserver.core.errors import NoTableError
from weightserver.core.lineage import Lineage
from weightserver.core.spec import TableSpec
from weightserver.storage.interface import Transaction
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import (
    ShardIdentity,
    State,
    descends,
    read_identity,
    read_lineage,
    read_peers,
    read_schedule,
    read_state,
    read_table,
)
from weightserver.storage.shard_builder import StoredBlock, TableState, checked_blocks


@dataclass(frozen=True)
class SourceShard:
    """One old shard, and which versions of its blocks to take."""

    txn: Transaction
    identity: ShardIdentity
    spec: TableSpec
    table_identity: bytes
    state: State
    checkpoint: str = ""
    """Name of the checkpoint whose rows to take; empty for the current rows."""

    @property
    def directory(self) -> Path:
        return self.txn.directory

    def blocks(self) -> Iterator[StoredBlock]:
        """The blocks to take. Raises as `checked_blocks`."""
        if not self.checkpoint:
            return checked_blocks(self.txn, self.spec, rows_stored=self.state.rows_stored)
        kept = self.state.checkpoint(self.checkpoint)
        return checked_blocks(self.txn, self.spec, rows_stored=kept.rows_stored, up_to=kept.generation)


def open_source(directory: Path, stack: ExitStack) -> SourceShard:
    """Opens a directory until `stack` is closed, which keeps others from serving it.

    Raises:
        ValueError: the directory holds no table.
        StorageError: the directory is damaged, or another process serves it.
    """
    storage = stack.enter_context(closing(LmdbStorage(directory, readonly=True)))
    txn = stack.enter_context(storage.read())
    identity = read_identity(txn)
    table = None if identity is None or identity.unfinished else read_table(txn)
    if identity is None or table is None:
        raise ValueError(f"{directory} holds no table: give the directories of all shards of one table")
    txn.check_contents()
    return SourceShard(txn, identity, *table, read_state(txn))


def common_spec(shards: list[SourceShard]) -> TableSpec:
    """The spec of the shards' table. Raises ValueError unless `shards` are all its shards, each once."""
    first = shards[0]
    for shard in shards:
        if shard.spec.is_another_size_of(first.spec):
            raise ValueError(
                f"{first.directory} and {shard.directory} hold tables of {first.spec.num_rows} and "
                f"{shard.spec.num_rows} rows, as after an extend_table() that failed halfway: serve them and repeat "
                "'weightserver extend'"
            )
        if shard.spec != first.spec or shard.table_identity != first.table_identity:
            raise ValueError(
                f"{first.directory} and {shard.directory} hold different tables: give the directories of one table"
            )
        if shard.identity.num_shards != len(shards):
            raise ValueError(
                f"{shard.directory} belongs to a cluster of {shard.identity.num_shards} shards, but {len(shards)} were "
                "given: give all"
            )
    if len({shard.identity.shard for shard in shards}) < len(shards):
        raise ValueError(f"two directories hold the same shard of {len(shards)}: give each once")
    return first.spec


def require_one_time(shards: list[SourceShard]) -> None:
    """Raises ValueError if the current rows of the shards are known to be of different times."""
    remedy = "so their rows are of different times: give --checkpoint"
    epochs = {shard.state.epoch for shard in shards}
    if len(epochs) > 1:
        raise ValueError(f"the shards are of sessions {sorted(epochs)}, {remedy}")
    first = shards[0]
    for shard in shards:
        if shard.state.session_id != first.state.session_id or shard.state.timeline != first.state.timeline:
            raise ValueError(
                f"{first.directory} and {shard.directory} were not opened, rolled back or restored together, {remedy}"
            )
    by_number = {shard.identity.shard: shard for shard in shards}
    for shard in shards:
        for number, mark in enumerate(read_peers(shard.txn)):
            other = by_number[number]
            if mark and not descends(other.state, read_lineage(other.txn), mark):
                raise ValueError(
                    f"{other.directory} is older than {shard.directory}, which knows of later writes to shard "
                    f"{number}: give its newest directory, or give --checkpoint"
                )


def table_state(shards: list[SourceShard], spec: TableSpec, checkpoint: str | None, current: bool) -> TableState:
    """The state in which the new shards begin.

    Raises:
        NoTableError: not all shards keep the checkpoint.
        ValueError: the shards' schedules contradict each other.
    """
    states = [shard.state for shard in shards]
    newest = max(states, key=lambda state: state.epoch)
    kept = None
    if not current:
        common = common_checkpoints([state.checkpoints for state in states])
        if not common:
            raise NoTableError("the shards keep no checkpoint in common: give --current for the rows as they are now")
        kept = chosen_checkpoint(checkpoint, common)
    if kept is None:
        clocks, marks = [state.clock for state in states], [state.mark for state in states]
        # A new one, which is the same when the call is repeated: a client's half write cannot be completed any more.
        timeline = xxhash.xxh3_128_hexdigest("".join(sorted(marks)).encode())
    else:
        known = [state.checkpoint(kept.name) for state in states]
        clocks, timeline = [kept.step] * len(known), kept.checkpoint_id.hex()
        marks = [one.mark for one in known]
    return TableState(
        spec,
        _common_learning_rates(shards, clocks),
        epoch=newest.epoch,
        run=newest.run,
        clock=max(clocks),
        checkpoint=kept,
        identity=shards[0].table_identity,
        timeline=timeline,
        lineage=Lineage().joined(
            mark
            for shard, up_to in zip(shards, marks, strict=True)
            for mark in read_lineage(shard.txn).up_to(up_to).marks
        ),
    )


def _common_learning_rates(shards: list[SourceShard], clocks: list[int]) -> Float32Array:
    """The longest of the shards' learning rates up to their clocks, of which all others are the beginning."""
    used = [read_schedule(shard.txn)[:clock] for shard, clock in zip(shards, clocks, strict=True)]
    longest = max(used, key=len)
    for shard, rates in zip(shards, used, strict=True):
        if not np.array_equal(longest[: len(rates)], rates):
            raise ValueError(
                f"the rows in {shard.directory} were updated by other learning rates than those of the other shards: "
                "give --checkpoint, one from before they differ"
            )
    return longest
