"""A disk that loses writes which it had confirmed: pages of the last commit are put back as they were before it.

Every wrong row is refused when it is fetched or, at the latest, by the next start, `verify`, `backup` and
`reshard`. What is noticed when, guarantees.md says.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.schedules import naming
from tests.integration.tables import begin
from weightserver import LocalCluster, StorageError, TableSpec, WeightClient, WeightServerError
from weightserver.core.arrays import Int64Array
from weightserver.operations.backup import backup
from weightserver.operations.verify import verify_directory
from weightserver.shard.changes import ShardChange
from weightserver.shard.reading import read_blocks
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader
from weightserver.storage.lmdb_storage import LmdbStorage

PAGE = 4_096
SPEC = TableSpec(num_rows=160, dim=64, rows_per_block=20)
"""Eight blocks of 10.5 KB, so that each has three pages of its own."""
INDEXED = TableSpec(num_rows=1_500, dim=8, rows_per_block=2)
"""Many small blocks: each database has several pages, and they lie where others' pages lay."""
OPENER = b"o" * 16
CHANCE = np.random.default_rng(0)
RANDOM = [np.sort(CHANCE.choice(160, 50, replace=False)) for _ in range(9)]
PATTERNS: dict[str, Callable[[int], Int64Array]] = {
    "all blocks": lambda step: np.arange(160),
    "the same two": lambda step: np.array([3, 70]),
    "a random third": lambda step: RANDOM[step],
    "a window": lambda step: np.arange(15 * step, 15 * step + 40),
}
NUM_WRITES = 9
RATES = naming(np.full(50, 0.1))


def page_of(content: bytes, page: int) -> bytes:
    return content[page * PAGE : (page + 1) * PAGE]


def put_page(data: Path, page: int, content: bytes) -> None:
    with data.open("r+b") as file:
        file.seek(page * PAGE)
        file.write(content)


class Trained:
    """A shard that is written to: its state before and after the last commit, and what that one left."""

    def __init__(self, directory: Path, spec: TableSpec = SPEC) -> None:
        self.directory, self.storage = directory, LmdbStorage(directory)
        self.shard = Shard(self.storage, shard=0, num_shards=1)
        self.sequence, self.epoch, self.spec = 0, self.shard.state.epoch, spec
        if self.shard.spec is None:
            self.begin()

    def begin(self) -> None:
        """A new table, of the same layout as the one before."""
        with self.shard.batch() as batch:
            batch.create_table(self.spec)
        self.epoch = self.shard.state.epoch + 1
        with self.shard.batch() as batch:
            batch.open_session("run", self.epoch, OPENER)

    def header(self, step: int = 0) -> WriteHeader:
        self.sequence += 1
        return WriteHeader(self.epoch, OPENER, b"w" * 16, self.sequence, step, RATES)

    def push(self, rows: Int64Array, step: int) -> None:
        gradients = np.full((len(rows), self.spec.dim), 1 + self.sequence, np.float32)
        with self.shard.batch() as batch:
            batch.push_gradients(self.header(step), rows, gradients)

    def checkpoint(self, name: str) -> None:
        self.shard.check_contents()
        with self.shard.batch() as batch:
            batch.checkpoint(self.header(self.shard.state.clock), name)

    @property
    def data(self) -> Path:
        return self.directory / "data.mdb"


@dataclass
class Lost:
    """The last commit of a shard that still runs, and its pages."""

    trained: Trained
    before: bytes
    after: bytes
    pages: list[int]
    """Numbers of those that it wrote, without LMDB's first two."""

    @classmethod
    def by(cls, trained: Trained, commit: Callable[[], None]) -> Lost:
        before = trained.data.read_bytes()
        commit()
        after = trained.data.read_bytes()
        before = before.ljust(len(after), b"\0")
        pages = [page for page in range(2, len(after) // PAGE) if page_of(before, page) != page_of(after, page)]
        return cls(trained, before, after, pages)

    def without(self, lost: list[int]) -> bytes:
        """The file's content if the disk lost these pages."""
        content = bytearray(self.after)
        for page in lost:
            content[page * PAGE : (page + 1) * PAGE] = page_of(self.before, page)
        return bytes(content)

    @property
    def of_blocks(self) -> list[int]:
        """The pages of large values. Only the first has a header, with their number at 12."""
        found, at = list[int](), 0
        while at < len(self.after) // PAGE:
            header = self.after[at * PAGE : at * PAGE + 16]
            is_large = int.from_bytes(header[10:12], "little") == 4
            count = int.from_bytes(header[12:16], "little") if is_large else 1
            found += range(at, at + count) if is_large else ()
            at += count
        return [page for page in self.pages if page in found]

    def subsets(self, num_random: int) -> Iterator[list[int]]:
        """Every single page; all; those of blocks, each alone and together; all others; and some at random."""
        yield from ([page] for page in self.pages)
        yield self.pages
        yield self.of_blocks
        yield [page for page in self.pages if page not in self.of_blocks]
        chance = np.random.default_rng(1)
        for _ in range(num_random):
            share = chance.choice([0.1, 0.5, 0.9])
            yield [page for page in self.pages if chance.random() < share]


def rows_of(shard: Shard, checkpoint: str | None = None) -> list[Any]:
    """What a fetch of each block answers, or that it is refused."""
    found = list[Any]()
    for block in range(SPEC.num_blocks):
        rows = np.arange(block * SPEC.rows_per_block, (block + 1) * SPEC.rows_per_block)
        try:
            ((_, message),) = shard.fetch(rows, step=None, state=True, checkpoint=checkpoint)
        except StorageError:
            found.append(None)
        else:
            found.append(message)
    return found


def states(shard: Shard) -> list[list[Any]]:
    return [rows_of(shard, name) for name in (None, *(kept.name for kept in shard.state.checkpoints))]


def contents(directory: Path) -> list[Any]:
    """Everything that is stored."""
    with closing(LmdbStorage(directory, readonly=True)) as storage, storage.read() as txn:
        names = ("meta", "schedule", "writers", "versions", "blocks")
        return [[(key, bytes(value)) for key, value in txn.items(name)] for name in names]


def damaged(directory: Path, content: bytes, lock: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "data.mdb").write_bytes(content)
    (directory / "owner.lock").write_bytes(lock)
    return directory


def check(lost: Lost, place: Path, subsets: Iterator[list[int]]) -> tuple[int, int]:
    """Loses each of these pages, while the shard runs and before a restart; returns in how many cases something else
    was stored than before, and in how many a running shard answered wrong rows."""
    truth, lock = states(lost.trained.shard), (lost.trained.directory / "owner.lock").read_bytes()
    everything = contents(whole := damaged(place / "whole", lost.after, lock))
    assert verify_directory(whole).problems == [], "where nothing is lost"
    num_changed = num_wrong = 0
    for pages in subsets:
        content = lost.without(pages)
        directory = damaged(place / "damaged", content, lock)
        try:
            found = contents(directory)
        except StorageError:
            found = []  # LMDB cannot read it
        problems = verify_directory(directory).problems
        if found == everything:
            continue
        assert problems, (pages, "verify finds nothing")
        num_changed += 1
        try:
            with closing(LmdbStorage(directory)) as storage:
                served = states(Shard(storage, shard=0, num_shards=1))
            for state, right in zip(served, truth, strict=True):
                assert all(one in (None, other) for one, other in zip(state, right, strict=True)), pages
            assert any(None in state for state in served), (pages, "a start that notices nothing")
        except StorageError:
            pass  # it does not start
        if set(pages) <= set(lost.of_blocks):
            num_wrong += wrong_while_running(lost, content, truth)
    return num_changed, num_wrong


def wrong_while_running(lost: Lost, content: bytes, truth: list[list[Any]]) -> bool:
    """Whether the shard, which has the file mapped, answers wrong rows."""
    descriptor = os.open(lost.trained.data, os.O_WRONLY)
    try:
        os.pwrite(descriptor, content, 0)
        served = states(lost.trained.shard)
    finally:
        os.pwrite(descriptor, lost.after, 0)
        os.close(descriptor)
    pairs = (pair for state, right in zip(served, truth, strict=True) for pair in zip(state, right, strict=True))
    return any(one not in (None, other) for one, other in pairs)


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    made = Trained(tmp_path / "shard-0")
    yield made
    made.storage.close()


@pytest.mark.parametrize("checkpoint_at", [None, 4], ids=["", "checkpoint"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_lost_page_is_silent(pattern: str, checkpoint_at: int | None, trained: Trained, tmp_path: Path) -> None:
    choose = PATTERNS[pattern]
    for step in range(NUM_WRITES - 1):
        trained.push(choose(step), step)
        if step == checkpoint_at:
            trained.checkpoint("kept")
    last = choose(NUM_WRITES - 1)
    lost = Lost.by(trained, lambda: trained.push(last, NUM_WRITES - 1))
    num_blocks = len(set((last // SPEC.rows_per_block).tolist()))
    assert len(lost.of_blocks) == 3 * num_blocks
    num_changed, num_wrong = check(lost, tmp_path, lost.subsets(12))
    assert num_changed >= len(lost.of_blocks) + 2
    assert num_wrong == 0


@pytest.mark.guard
def test_no_subset_of_lost_pages_is_silent(trained: Trained, tmp_path: Path) -> None:
    """All of them, of a commit of one block."""
    for step in range(NUM_WRITES - 1):
        trained.push(PATTERNS["the same two"](step), step)
    lost = Lost.by(trained, lambda: trained.push(np.array([3]), NUM_WRITES - 1))
    assert len(lost.pages) <= 11
    subsets = (list(some) for count in range(len(lost.pages) + 1) for some in itertools.combinations(lost.pages, count))
    num_changed, num_wrong = check(lost, tmp_path, subsets)
    assert (num_changed > 2 ** (len(lost.pages) - 1), num_wrong) == (True, 0)


def test_rows_of_a_dropped_table_never_come_back(trained: Trained, tmp_path: Path) -> None:
    """Another run's rows, of the same layout, lie where the new table's are stored."""
    for _ in range(3):
        for step in range(2):
            trained.push(np.arange(160), step)
        with trained.shard.batch() as batch:
            batch.drop_table()
        trained.begin()
    lost = Lost.by(trained, lambda: trained.push(np.arange(160), 0))
    num_changed, num_wrong = check(lost, tmp_path, lost.subsets(10))
    assert (num_changed > len(lost.of_blocks), num_wrong) == (True, 0)


@pytest.mark.parametrize("commit", ["checkpoint", "release", "rollback", "session", "drop", "create"])
def test_a_lost_page_of_any_commit_is_noticed(commit: str, trained: Trained, tmp_path: Path) -> None:
    for step in range(3):
        trained.push(np.arange(160), step)
        trained.checkpoint(f"checkpoint {step}")
    shard = trained.shard

    changes: dict[str, Callable[[ShardChange], object]] = {
        "checkpoint": lambda batch: batch.checkpoint(trained.header(3), "last"),
        "release": lambda batch: batch.release(trained.header(), "checkpoint 1"),
        "rollback": lambda batch: batch.rollback(trained.header(), "checkpoint 0"),
        "session": lambda batch: batch.open_session("next", shard.state.epoch + 1, b"p" * 16),
        "drop": ShardChange.drop_table,
        "create": lambda batch: batch.create_table(SPEC),
    }

    def change(kind: str) -> None:
        with shard.batch() as batch:
            changes[kind](batch)

    if commit == "create":
        change("drop")
    lost = Lost.by(trained, lambda: change(commit))
    if commit in ("drop", "create"):  # no rows can be read
        lock = (trained.directory / "owner.lock").read_bytes()
        everything = contents(damaged(tmp_path / "whole", lost.after, lock))
        for pages in lost.subsets(10):
            directory = damaged(tmp_path / "damaged", lost.without(pages), lock)
            problems = verify_directory(directory).problems
            assert problems or contents(directory) == everything, pages
    else:
        check(lost, tmp_path, lost.subsets(10))


# ---- shards that go on


SOME = [np.sort(CHANCE.choice(INDEXED.num_rows, 40, replace=False)) for _ in range(NUM_WRITES + 2)]
INDEXED_PATTERNS: dict[str, Callable[[int], Int64Array]] = {
    "a few": lambda step: SOME[step],
    "a window": lambda step: np.arange(100 * step, 100 * step + 500),
}
FAILURE, BLOCK = "DamagedFileError", "DamagedBlockError"


@pytest.mark.parametrize(
    ("pattern", "checkpoint_at"),
    [
        pytest.param("a few", NUM_WRITES - 2, marks=pytest.mark.guard),
        pytest.param("a window", 4, marks=pytest.mark.guard),
        pytest.param("a few", 4, marks=pytest.mark.slow),
        pytest.param("a window", NUM_WRITES - 2, marks=pytest.mark.slow),
    ],
)
def test_a_shard_that_goes_on_after_a_loss_hides_nothing(pattern: str, checkpoint_at: int, tmp_path: Path) -> None:
    """Pages of the last three pushes and a checkpoint, of any database: all calls answer as if nothing was lost, or
    fail with an error of their own. Wrong rows never reach a checkpoint; then, and at damage of a database, the shard
    is not healthy any more. If LMDB itself ends the process, the next start is refused."""
    choose, trained = INDEXED_PATTERNS[pattern], Trained(tmp_path / "shard-0", INDEXED)
    for step in range(NUM_WRITES - 3):
        trained.push(choose(step), step)
        if step == checkpoint_at:
            trained.checkpoint("kept")

    def commits() -> None:
        for step in range(NUM_WRITES - 3, NUM_WRITES):
            trained.push(choose(step), step)
            if step == checkpoint_at:
                trained.checkpoint("kept")

    lost = Lost.by(trained, commits)
    trained.storage.close()
    groups = [list[int](), *lost.subsets(12)]
    sequence, lock = trained.sequence, (trained.directory / "owner.lock").read_text()
    (tmp_path / "before").write_bytes(lost.before)
    (tmp_path / "after").write_bytes(lost.after)
    (tmp_path / "job.json").write_text(json.dumps([pattern, sequence, lock, groups]))
    (whole, *others), seen = outcomes(tmp_path, len(groups)), set[str]()
    assert set(whole.values()) & {FAILURE, BLOCK, ""} == {""}, "where nothing is lost"
    for pages, outcome in zip(groups[1:], others, strict=True):
        errors = {name: result for name, result in outcome.items() if result.endswith("Error")}
        answered = outcome.keys() - errors.keys() - {"problem", "verify"}
        wrong = [name for name in answered if outcome[name] != whole[name]]
        assert not wrong or errors.keys() >= {"checkpoint", "backup"}, (pages, outcome)
        assert FAILURE not in errors.values() or outcome["problem"], (pages, outcome)
        assert outcome == whole or outcome["verify"], (pages, outcome)
        seen |= set(errors.values())
    assert seen >= {FAILURE, BLOCK}


def outcomes(place: Path, number: int) -> list[dict[str, str]]:
    """What each call answers, in each case, by a process that LMDB may end: then another one goes on."""
    found = list[dict[str, str]]()
    while len(found) < number:
        command = [sys.executable, "-m", __name__, str(place), str(len(found))]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        found += map(json.loads, done.stdout.splitlines())
        if done.returncode:
            assert (done.returncode, "mdb.c" in done.stderr) == (-signal.SIGABRT, True), done.stderr
            found.append({"verify": "\n".join(verify_directory(place / "running").problems)})
    return found


def go_on(place: Path, first: int) -> None:
    """Prints the answers of a running shard that has lost some pages, for each case from `first` on."""
    before, after = (place / "before").read_bytes(), (place / "after").read_bytes()
    pattern, sequence, lock, groups = json.loads((place / "job.json").read_text())
    for pages in groups[first:]:
        trained = Trained(damaged(place / "running", after, lock.encode()), INDEXED)
        trained.sequence = sequence
        for page in pages:
            put_page(trained.data, page, page_of(before, page))
        print(json.dumps(answers(trained, INDEXED_PATTERNS[pattern])), flush=True)


def answers(trained: Trained, choose: Callable[[int], Int64Array]) -> dict[str, str]:
    """What each call returns, or the class of its error."""
    shard, everything, found = trained.shard, np.arange(INDEXED.num_rows), dict[str, str]()

    def fetch(checkpoint: str | None = None) -> str:
        chunks = [message for _, message in shard.fetch(everything, step=None, state=True, checkpoint=checkpoint)]
        return hashlib.sha256(b"".join(chunks)).hexdigest()

    def copy() -> str:
        """All blocks of the checkpoint, as a backup reads them, and its rows."""
        first: int | None = 0
        while first is not None:
            part = read_blocks(
                trained.storage, shard.require_table(), first, checkpoint="last", is_needed=lambda block: True
            )
            first = part.blocks[-1][0].block + 1 if part.blocks else part.next_block
        return fetch("last")

    calls: list[tuple[str, Callable[[], str | None]]] = [
        ("fetch", fetch),
        ("push", lambda: trained.push(choose(NUM_WRITES), NUM_WRITES)),
        ("push again", lambda: trained.push(choose(NUM_WRITES + 1), NUM_WRITES + 1)),
        ("fetch again", fetch),
        ("fetch the older checkpoint", lambda: fetch("kept")),
        ("checkpoint", lambda: trained.checkpoint("last")),
        ("backup", copy),
    ]
    for name, call in calls:
        try:
            found[name] = call() or ""
        except WeightServerError as error:  # any other ends the process
            found[name] = type(error).__name__
    found["problem"] = trained.storage.problem()
    trained.storage.close()
    return found | {"verify": "\n".join(verify_directory(trained.directory).problems)}


@pytest.mark.parametrize("every", [pytest.param(4, marks=pytest.mark.guard), pytest.param(1, marks=pytest.mark.slow)])
def test_no_operation_copies_a_loss(every: int, tmp_path: Path) -> None:
    """From a shard that runs while its disk loses a page. A reshard reads blocks as a backup does."""
    with LocalCluster(1, tmp_path / "cluster") as cluster, WeightClient(cluster.addresses, retry_seconds=5) as client:
        begin(client, SPEC)
        data = tmp_path / "cluster/shard-0/data.mdb"
        for step in range(NUM_WRITES):
            client.checkpoint(f"older {step}", step=step)  # so that versions which were replaced stay
            before = data.read_bytes()
            client.push_gradients(np.arange(160), np.ones((160, SPEC.dim), np.float32), step=step)
        client.checkpoint("kept", step=NUM_WRITES)
        after = data.read_bytes()
        before = before.ljust(len(after), b"\0")
        right = backup(client, tmp_path / "whole", checkpoint="kept").shards
        num_refused = 0
        for page in range(2, len(after) // PAGE)[::every]:  # also with 4 each page of a block is met: it has three
            now = page_of(data.read_bytes(), page)
            if page_of(before, page) == page_of(after, page) or now != page_of(after, page):
                continue  # the last commits did not write it, or another one has written it since
            put_page(data, page, page_of(before, page))
            try:
                assert backup(client, tmp_path / f"backup-{page}", checkpoint="kept").shards == right, page
                refused = False
            except WeightServerError:
                refused = True
            if page_of(data.read_bytes(), page) == page_of(before, page):  # the backup's commits did not write it
                put_page(data, page, now)
            if refused:
                num_refused += 1
                cluster.restart(0)  # a shard that met damage takes no more writes
        assert num_refused > 20 // every
        client.checkpoint("again", step=NUM_WRITES)
        assert backup(client, tmp_path / "backup").rows_stored == 160


if __name__ == "__main__":
    go_on(Path(sys.argv[1]), int(sys.argv[2]))
