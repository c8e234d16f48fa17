"""Reads everything that a shard's directory holds, and says what is wrong where. Nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from weightserver.core.blocks import BlockCodec
from weightserver.core.errors import StorageError
from weightserver.core.sharding import Sharding
from weightserver.core.spec import TableSpec
from weightserver.storage.integrity import structural_problems
from weightserver.storage.interface import Transaction
from weightserver.storage.lmdb_storage import LmdbStorage, block_key_parts
from weightserver.storage.records import State, read_identity, read_records, read_schedule, read_spec, read_state


@dataclass
class Verdict:
    """What was read, and what is wrong with it."""

    num_blocks: int = 0
    num_versions: int = 0
    problems: list[str] = field(default_factory=list)
    """One line each."""


def verify_directory(directory: Path) -> Verdict:
    """LMDB's pages first, then the shard's identity, table and state, then every version of every block.

    Raises:
        StorageError: another process serves the directory, or it holds no data.
    """
    if problems := structural_problems(directory):
        return Verdict(problems=[f"data.mdb: {problem}" for problem in problems])
    verdict = Verdict()
    with closing(LmdbStorage(directory, readonly=True)) as storage, storage.read() as txn:
        try:
            _verify(txn, verdict)
        except StorageError as error:
            verdict.problems.append(str(error))
    return verdict


def _verify(txn: Transaction, verdict: Verdict) -> None:
    """As `serve` reads it, and all else. Raises StorageError where nothing further can be told."""
    identity = read_identity(txn)
    for database in ("meta", "writers"):
        for _ in read_records(txn, database):
            pass
    if identity is None:
        raise StorageError(f"{txn.directory}: it holds no shard")
    if identity.unfinished:
        raise StorageError(f"{txn.directory}: it is unfinished: repeat the 'restore' or 'reshard' that was stopped")
    spec, state, horizon = read_spec(txn), read_state(txn), len(read_schedule(txn))
    if spec is not None:
        _verify_blocks(
            txn, spec, Sharding(spec.rows_per_block, identity.num_shards), identity.shard, state, horizon, verdict
        )


def _verify_blocks(
    txn: Transaction,
    spec: TableSpec,
    sharding: Sharding,
    shard: int,
    state: State,
    horizon: int,
    verdict: Verdict,
) -> None:
    codec = BlockCodec(spec)
    generation, checkpoints = state.generation, state.checkpoints
    stored: Counter[str] = Counter()
    changes = {(int.from_bytes(key[4:], "big"), int.from_bytes(key[:4], "big")) for key, _ in txn.items("changes")}
    for block, versions in _by_block(txn):
        verdict.num_blocks += 1
        verdict.num_versions += len(versions)
        for number, (version, value) in enumerate(versions):
            newer = versions[number - 1][0] if number else generation + 1
            holders = [kept.name for kept in checkpoints if version <= kept.generation < newer]
            used_by = [*["now"] * (not number), *holders]
            where = f"{codec.name(block)}, generation {version} ({', '.join(used_by) or 'unused'})"
            known = (block, version) in changes
            changes.discard((block, version))
            if problem := codec.problem(block, value):
                verdict.problems.append(f"{where}: it {problem}")
                continue
            stored.update({holder: codec.num_written(value) for holder in used_by})
            verdict.problems += [f"{where}: {problem}" for problem in _problems(codec, value, horizon)]
            if version > generation:
                verdict.problems.append(f"{where}: the shard is only at generation {generation}")
            if version and not known:
                verdict.problems.append(f"{where}: a rollback would not find it")
        if sharding.shard_of(np.array([block * spec.rows_per_block]))[0] != shard:
            verdict.problems.append(f"block {block}: it belongs to another shard")
    verdict.problems += [f"block {block}, generation {version}: it is missing" for block, version in sorted(changes)]
    if not verdict.problems:  # else damaged blocks are not counted
        counts = {"now": state.rows_stored} | {kept.name: kept.rows_stored for kept in checkpoints}
        for holder, wanted in counts.items():
            if stored[holder] != wanted:
                verdict.problems.append(f"{holder}: {wanted} rows were written, the blocks hold {stored[holder]}")


def _problems(codec: BlockCodec, value: memoryview, horizon: int) -> Iterator[str]:
    rows = codec.views(value)
    if not (np.isfinite(rows.weight).all() and np.isfinite(rows.momentum_buffer).all()):
        yield "it holds NaN or infinite values"
    if not 0 <= rows.last_step.min() <= rows.last_step.max() <= horizon:
        yield f"a last_step lies outside the schedule's 0..{horizon}"


def _by_block(txn: Transaction) -> Iterator[tuple[int, list[tuple[int, memoryview]]]]:
    """(block, its versions newest first)."""
    current, versions = -1, list[tuple[int, memoryview]]()
    for key, value in txn.items("blocks"):
        block, version = block_key_parts(key)
        if block != current and versions:
            yield current, versions
            versions = []
        current = block
        versions.append((version, value))
    if versions:
        yield current, versions
