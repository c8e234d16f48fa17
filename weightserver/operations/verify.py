"""Checks everything that a shard's directory holds, and reports each problem with its place. Changes nothing."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from weightserver.common.atomic_files import to_path
from weightserver.core.blocks import BlockCodec
from weightserver.core.errors import DamagedBlockError, DamagedFileError, StorageError
from weightserver.core.sharding import Sharding
from weightserver.core.spec import TableSpec
from weightserver.core.versions import by_block
from weightserver.storage.interface import Transaction
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import (
    ShardIdentity,
    State,
    read_identity,
    read_records,
    read_state,
    read_table,
)


@dataclass
class Verdict:
    """How much was read, and the problems found."""

    num_blocks: int = 0
    num_versions: int = 0
    problems: list[str] = field(default_factory=list)
    """One line per problem."""


def verify_directory(directory: Path) -> Verdict:
    """Checks LMDB's pages, then the shard's identity, table and state, then every version of every block.

    Raises:
        StorageError: another process serves the directory, or it holds no data.
    """
    verdict = Verdict()
    had_lock = (directory / "owner.lock").exists()
    try:
        with closing(LmdbStorage(directory, readonly=True)) as storage, storage.read() as txn:
            try:
                _verify(txn, verdict)
            except StorageError as error:
                verdict.problems.append(str(error))
    except DamagedFileError as error:
        verdict.problems += [f"data.mdb: {problem}" for problem in error.problems]
    if not had_lock and (directory / "owner.lock").exists():
        raise StorageError(f"{directory} began to be served while it was read: stop that shard, and verify again")
    return verdict


def _verify(txn: Transaction, verdict: Verdict) -> None:
    """Checks all records. Raises StorageError at a problem that prevents further checks."""
    identity = read_identity(txn)
    txn.check_contents()
    for database in ("meta", "schedule", "writers"):
        for _ in read_records(txn, database):
            pass
    if identity is None:
        raise StorageError(f"{txn.directory}: it holds no shard")
    if identity.unfinished:
        raise StorageError(f"{txn.directory}: it is unfinished: repeat the 'restore' or 'reshard' that was stopped")
    table, state = read_table(txn), read_state(txn)
    if table is not None:
        spec, _ = table
        _verify_blocks(txn, spec, identity, state, verdict)


def _verify_blocks(txn: Transaction, spec: TableSpec, identity: ShardIdentity, state: State, verdict: Verdict) -> None:
    codec, stored = BlockCodec(spec), Counter[str]()
    sharding = Sharding(spec.rows_per_block, identity.num_shards)
    for block, versions in by_block(txn.versions()):
        verdict.num_blocks += 1
        verdict.num_versions += len(versions)
        newer = None
        for version in versions:
            holders = _holders(state, version.generation, newer)
            newer = version.generation
            used_by = ", ".join(holder or "now" for holder in holders) or "unused"
            where = f"{codec.name(block)}, generation {newer} ({used_by})"
            try:
                value = txn.content(version)
            except DamagedBlockError:
                verdict.problems.append(f"{where}: it is missing")
                continue
            if problem := codec.problem(block, version.write_id, value):
                verdict.problems.append(f"{where}: it {problem}")
                continue
            stored.update({holder: codec.num_written(value) for holder in holders})
            verdict.problems += [f"{where}: {problem}" for problem in _problems(codec, value, state.clock)]
            if version.generation > state.generation:
                verdict.problems.append(f"{where}: the shard is only at generation {state.generation}")
        if sharding.shard_of_block(block) != identity.shard:
            verdict.problems.append(f"block {block}: it belongs to another shard")
    if not verdict.problems:  # the rows of damaged blocks are not counted
        verdict.problems += _wrong_counts(state, stored)


def _holders(state: State, version: int, newer: int | None) -> list[str]:
    """Names the states that read a version, followed by version `newer`: checkpoints, and "" for the newest, as no
    checkpoint is named."""
    end = state.generation + 1 if newer is None else newer
    kept = [known.name for known in state.checkpoints if version <= known.generation < end]
    return [*[""] * (newer is None), *kept]


def _wrong_counts(state: State, stored: Counter[str]) -> Iterator[str]:
    counts = {"": state.rows_stored} | {kept.name: kept.rows_stored for kept in state.checkpoints}
    for holder, wanted in counts.items():
        if stored[holder] != wanted:
            yield f"{holder or 'now'}: {wanted} rows were written, the blocks hold {stored[holder]}"


def _problems(codec: BlockCodec, value: memoryview, clock: int) -> Iterator[str]:
    rows, precision = codec.views(value), codec.precision
    if not (precision.all_finite(rows.weight) and precision.all_finite(rows.momentum_buffer)):
        yield "it holds NaN or infinite values"
    if not 0 <= rows.last_step.min() <= rows.last_step.max() <= clock:
        yield f"a last_step lies outside 0..{clock}, the clock"


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=to_path, help="the --data-dir of a shard")


def run(arguments: argparse.Namespace) -> None:
    verdict = verify_directory(arguments.directory)
    for problem in verdict.problems:
        print(problem)
    print(f"{verdict.num_blocks} blocks, {verdict.num_versions} versions, {len(verdict.problems)} problems")
    if verdict.problems:
        sys.exit(1)
