"""The state machine, the group commit and the storage below it, on a real LMDB directory, without gRPC."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.schedules import naming
from tests.helpers.stored import decoded, get, put, stored, version_of
from tests.helpers.watching import wait_until
from weightserver.core.blocks import BlockCodec
from weightserver.core.errors import (
    DamagedFileError,
    DataLossError,
    FencedError,
    InvalidRequestError,
    MissingRatesError,
    NoTableError,
    OverloadedError,
    ShardUnavailableError,
    StepError,
    StorageError,
    TableMismatchError,
    WeightServerError,
    WrongShardError,
)
from weightserver.core.initial import initial_rows
from weightserver.core.lineage import MAX_ANCESTORS, Lineage, split_mark
from weightserver.core.spec import TableSpec
from weightserver.core.versions import NEWEST, Version, digest, unneeded
from weightserver.protocol.codec import table_number
from weightserver.protocol.status import ERROR_OF_STATUS
from weightserver.shard import changes, reading, sweeper
from weightserver.shard.changes import ShardChange
from weightserver.shard.group_commit import MAX_WAITING, CancellableFuture, Committer
from weightserver.shard.shard import Shard
from weightserver.shard.sweeper import Sweeper
from weightserver.shard.transaction import WriteHeader
from weightserver.storage import integrity, records
from weightserver.storage.integrity import check_pages
from weightserver.storage.lmdb_storage import LmdbStorage

SESSION_ID = b"o" * 16
SPEC = TableSpec(num_rows=100, dim=4, rows_per_block=6)
ROWS = np.array([1, 2, 50], np.int64)
GRADIENT = np.ones((3, 4), np.float32)
RATES = np.full(30, 0.5)


def header(
    sequence: int, step: int = 0, *, epoch: int = 1, writer: bytes = b"w" * 16, rates: npt.ArrayLike = RATES
) -> WriteHeader:
    return WriteHeader(epoch, SESSION_ID, writer, sequence, step, rates=naming(rates))


def pushing(header: WriteHeader, gradient: np.ndarray = GRADIENT) -> Callable[[ShardChange], bool]:
    return lambda batch: batch.push_gradients(header, ROWS, gradient)


class Served:
    """A shard, its storage and its committer; `do` runs one operation."""

    def __init__(self, directory: Path) -> None:
        self.storage = LmdbStorage(directory)
        self.shard = Shard(self.storage, shard=0, num_shards=1)
        self.committer = Committer(self.shard.batch)
        self.sweeper = Sweeper(self.shard, self.committer)
        self.grouped = list[CancellableFuture[object]]()

    def do(self, operation: Callable[[ShardChange], object]) -> object:
        return self.committer.submit(operation).result(60)

    def group(self, *operations: Callable[[ShardChange], object]) -> list[CancellableFuture[object]]:
        """Commits them as one group: they wait while the committer is busy."""
        busy, go = threading.Event(), threading.Event()
        self.committer.submit(lambda batch: (busy.set(), go.wait(60)))
        assert busy.wait(60)
        self.grouped = [self.committer.submit(operation) for operation in operations]
        go.set()
        assert not wait(self.grouped, 60).not_done
        return self.grouped

    def push(self, sequence: int, **options: Any) -> object:
        return self.do(pushing(header(sequence, **options)))

    def weights(self) -> np.ndarray:
        return decoded(self.shard.fetch(np.arange(100), step=None, state=False), SPEC).weight

    def close(self) -> None:
        self.committer.close()
        self.storage.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    served.do(lambda batch: batch.create_table(SPEC))
    served.do(lambda batch: batch.open_session("first", 1, SESSION_ID))
    yield served
    served.close()


def test_a_duplicate_is_answered_and_not_applied(served: Served) -> None:
    assert served.push(1) is True
    once = served.weights()
    assert served.push(1) is False
    assert np.array_equal(served.weights(), once)
    assert served.push(1, writer=b"v" * 16) is True  # another writer's numbers are its own
    assert not np.array_equal(served.weights(), once)


def test_a_note_that_cannot_be_written_undoes_no_commit(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is durable by then. A shard that took it for undone would write the next one over a checkpoint."""

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    served.push(1, step=0)
    weights = served.weights()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        assert served.do(lambda batch: batch.checkpoint(header(2, 1), "kept", b"i" * 16)) is True
    assert served.push(3, step=1) is True
    served.close()
    again = Served(tmp_path)
    chunks = again.shard.fetch(np.arange(100), step=None, state=False, checkpoint="kept")
    assert np.array_equal(decoded(chunks, SPEC).weight, weights)
    again.close()


def test_a_fetch_ends_when_others_learning_rates_are_used_meanwhile(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would have moved by two schedules; one by the learning rates of the fetch does not disturb it."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 400)
    served.push(1)
    fetches = [served.shard.fetch(np.arange(100), step=10, state=False, rates=naming(RATES)) for _ in range(2)]
    for chunks in fetches:
        next(chunks)
    served.push(2, step=1)
    assert len(list(fetches[0])) > 2
    served.push(3, step=2, rates=[0.5, 0.5, 0.25])
    with pytest.raises(MissingRatesError, match="it has 3"):
        list(fetches[1])
    with pytest.raises(TableMismatchError, match=r"the learning rate of step 2 is 0\.25 and was used, not 0\.5"):
        next(served.shard.fetch(np.arange(100), step=10, state=False, rates=naming(RATES)))


def test_a_fetch_ends_when_rows_are_rolled_back_meanwhile(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may use other learning rates from then on, and its rows are of two times."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 400)

    served.do(lambda batch: batch.checkpoint(header(1), "one"))
    served.push(2)
    chunks = served.shard.fetch(np.arange(100), step=10, state=False, rates=naming(RATES))
    next(chunks)
    served.do(lambda batch: batch.rollback(header(3), "one"))
    with pytest.raises(MissingRatesError, match="it has 0"):
        next(chunks)


def test_a_fetch_continues_after_an_extension_but_not_after_a_drop(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.push(1)
    before = served.weights()
    monkeypatch.setattr(reading, "CHUNK_BYTES", 400)
    chunks = served.shard.fetch(np.arange(100), step=None, state=False)
    first = next(chunks)
    earlier = table_number(SPEC, served.shard.table_identity)
    assert served.do(lambda batch: batch.extend_table(1_000)) is True
    assert served.do(lambda batch: batch.extend_table(1_000)) is False
    assert np.array_equal(decoded([first, *chunks], SPEC).weight, before)
    served.close()
    with closing(Served(tmp_path)) as again:
        again.shard.require_table(earlier)  # clients that know the smaller table continue, after a restart too

        def fetched_after_it_waited(digest: int) -> None:
            next(again.shard.fetch(np.arange(100), step=None, state=False, number=digest))

        fetched_after_it_waited(earlier)
        chunks = again.shard.fetch(np.arange(100), step=None, state=False)
        next(chunks)
        again.do(ShardChange.drop_table)
        again.do(lambda batch: batch.create_table(SPEC))
        with pytest.raises(TableMismatchError, match="the table was dropped while its rows were read"):
            next(chunks)
        for refused in (again.shard.require_table, fetched_after_it_waited):
            with pytest.raises(TableMismatchError, match=r"the table was replaced, it is now .*num_rows=100,"):
                refused(earlier)


def test_a_failing_write_does_not_affect_others_of_its_group(served: Served) -> None:
    """Two of four fail after they have written, the second one by an error that nobody expects."""
    huge = np.full((3, 4), 3e38, np.float32)

    def twice(batch: ShardChange) -> None:
        pushing(header(2, 5), huge)(batch)
        pushing(header(3, 5), huge)(batch)

    def spoilt(batch: ShardChange) -> None:
        pushing(header(3, 6, rates=[*RATES[:6], 0.25]))(batch)
        raise OSError("a bug")

    good, bad, worse, last = served.group(pushing(header(1, 5)), twice, spoilt, pushing(header(3, 5)))
    assert good.result() is True
    with pytest.raises(StepError, match=r"row . would be infinite or NaN after update 5"):
        bad.result()
    with pytest.raises(OSError, match="a bug"):
        worse.result()
    assert last.result() is True, "a failed write's sequence number was kept"
    assert served.shard.used_rates.values.tolist() == [0.5] * 6, "learning rates of a failed write were used"
    expected = initial_rows(SPEC, ROWS)
    decayed = expected * np.float32(1e-4)
    np.testing.assert_allclose(served.weights()[ROWS], expected - 1.0, atol=np.abs(decayed).max() + 1e-2)
    with pytest.raises(FencedError, match="write 2 of this writer is settled"):
        served.push(2, step=5)


def test_operations_of_a_group_build_on_earlier_ones(tmp_path: Path) -> None:
    """As calls do that arrive while the disk is busy."""
    spec = replace(SPEC, weight_decay=0.0)

    def create(batch: ShardChange) -> None:
        batch.create_table(spec)

    def open_session(batch: ShardChange) -> None:
        batch.open_session("run", 1, SESSION_ID)

    with closing(Served(tmp_path)) as served:
        for future in served.group(create, open_session, pushing(header(1, 2))):
            assert future.exception() is None
        np.testing.assert_allclose(served.weights()[ROWS], initial_rows(spec, ROWS) - 0.5, rtol=1e-6)
        dropped, pushed = served.group(ShardChange.drop_table, pushing(header(2, 3)))
        assert dropped.exception() is None
        assert isinstance(pushed.exception(), NoTableError)
        assert (served.shard.spec, served.shard.state.epoch, served.shard.state.rows_stored) == (None, 2, 0)
        served.do(create)
        assert len(served.shard.used_rates) == 0
        assert np.array_equal(served.weights(), initial_rows(SPEC, np.arange(100)))
    with closing(Served(tmp_path)) as again:
        assert len(again.shard.used_rates) == 0, "the dropped table's schedule came back"


def test_the_first_of_two_learning_rates_in_a_group_counts(served: Served, tmp_path: Path) -> None:
    """The second push brings another one, and is refused whatever it shares a commit with."""
    first, second = served.group(pushing(header(1, rates=[0.5])), pushing(header(2, rates=[2.0])))
    assert first.result() is True
    with pytest.raises(TableMismatchError, match=r"the learning rate of step 0 is 0\.5 and was used, not 2"):
        second.result()
    weights = served.weights()
    np.testing.assert_allclose(weights[ROWS], initial_rows(SPEC, ROWS) * (1 - 0.5 * SPEC.weight_decay) - 0.5, rtol=1e-6)
    served.close()
    with closing(Served(tmp_path)) as again:
        with pytest.raises(TableMismatchError):
            again.push(3, rates=[2.0])
        assert np.array_equal(again.weights(), weights)


def test_a_write_cancelled_while_it_runs_is_undone(served: Served) -> None:
    """The others of its group are applied, and a repetition of the cancelled write is applied once."""

    def given_up(batch: ShardChange) -> object:
        served.grouped[0].cancel()
        return pushing(header(2))(batch)

    cancelled, other = served.group(given_up, pushing(header(1)))
    assert isinstance(cancelled.exception(), CancelledError)
    assert other.result() is True
    once = served.weights()
    assert [served.push(2), served.push(2)] == [True, False]
    assert (served.weights()[ROWS] < once[ROWS]).all()


def test_a_full_committer_refuses_and_drains_when_closed() -> None:
    """In the order of arrival; closing waits no longer than it may for a hanging disk."""
    hanging, go, seen = threading.Event(), threading.Event(), list[int]()

    @contextmanager
    def transaction() -> Iterator[SimpleNamespace]:
        yield SimpleNamespace()
        hanging.set()
        go.wait(60)

    committer = Committer(transaction)
    committer.submit(lambda batch: None)
    assert hanging.wait(60)
    waiting = [committer.submit(lambda batch, n=n: seen.append(n)) for n in range(MAX_WAITING)]
    with pytest.raises(OverloadedError, match="no room for another write"):
        committer.submit(lambda batch: None)
    assert waiting[7].cancel()
    assert not committer.close(0.01)
    go.set()
    assert committer.close(60)
    assert seen == [n for n in range(MAX_WAITING) if n != 7]
    assert all(future.done() for future in waiting)
    with pytest.raises(OverloadedError):
        committer.submit(lambda batch: None)  # which nothing would commit


def test_the_newest_version_of_a_block_is_found(tmp_path: Path) -> None:
    storage = LmdbStorage(tmp_path)
    with storage.write() as txn:
        put(txn, 3, 0, bytearray(b"old"))
        put(txn, 3, 70_000, bytearray(b"new"))
        put(txn, 3, 2, bytearray(b"between"))
        put(txn, 5, 9, bytearray(b"other"))
    with storage.read() as txn:
        assert get(txn, 3) == b"new"
        assert get(txn, 5) == b"other"
        assert get(txn, 4) is None
        assert get(txn, 2) is None
        assert get(txn, 6) is None
        keys = stored(txn)
    assert keys == [(3, 70_000), (3, 2), (3, 0), (5, 9)]
    storage.close()


def test_the_blocks_of_a_checkpoint_are_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks that were written at the time, from any number on, whatever the size of an answer."""

    def read_blocks(first: int, checkpoint: str, **since: str) -> reading.CheckpointBlocks:
        table = served.shard.require_table()
        return reading.read_blocks(
            served.storage, table, first, checkpoint=checkpoint, is_needed=lambda block: True, **since
        )

    def read(checkpoint: str, first: int | None = 0, **since: str) -> dict[int, bytes]:
        found, following = dict[int, bytes](), first
        while following is not None:
            some = read_blocks(following, checkpoint, **since)
            blocks, following = {version.block: content for version, content in some.blocks}, some.next_block
            assert not found or min(blocks, default=99) > max(found)
            found |= blocks
        return found

    served.do(lambda batch: batch.checkpoint(header(1, 0), "empty"))
    served.push(2)  # blocks 0 and 8
    served.do(lambda batch: batch.checkpoint(header(3, 1), "one"))
    kept = read("one")
    assert sorted(kept) == [0, 8]
    codec = BlockCodec(SPEC)
    assert [codec.written(kept[block]).tolist() for block in (0, 8)] == [[1, 2], [2]]
    rows, gradient = np.array([3, 20, 99], np.int64), np.ones((3, 4), np.float32)  # blocks 0, 3 and 16
    served.do(lambda batch: batch.push_gradients(header(4, 1), rows, gradient))
    served.do(lambda batch: batch.checkpoint(header(5, 2), "two"))
    for seen, num_bytes in ((50_000, 4 << 20), (1, 4 << 20), (3, 1)):
        monkeypatch.setattr(reading, "_MAX_SEEN_BLOCKS", seen)
        monkeypatch.setattr(reading, "READ_BYTES", num_bytes)
        assert read("empty") == {}
        assert read("one") == kept
        assert sorted(read("two")) == [0, 3, 8, 16]
        assert sorted(read("two", first=4)) == [8, 16]
        assert read("two", first=17) == {}
        assert sorted(read("two", since="one")) == [0, 3, 16]
        assert read("two", since="empty") == read("two")
        assert read("two", since="two") == {}
    served.do(lambda batch: batch.extend_table(200))
    far = np.array([150], np.int64)  # of block 25, after the table of the checkpoint
    served.do(lambda batch: batch.push_gradients(header(6, 2), far, gradient[:1]))
    assert read_blocks(16, "two").next_block is None
    with served.storage.read() as snapshot:
        changed = [(block, version_of(snapshot, block).write_id) for block in (0, 3, 16)]
    assert read_blocks(17, "two", since="one").digest == digest(changed)
    with pytest.raises(InvalidRequestError, match="'two' is later than 'one'"):
        read("one", since="two")
    with pytest.raises(NoTableError, match="no checkpoint 'three'"):
        read("three")
    with served.storage.write() as txn:
        damaged = bytearray(get(txn, 3) or b"")
        damaged[50] ^= 1
        txn.put_block(version_of(txn, 3), damaged)
    with pytest.raises(StorageError, match="block 3"):
        read("two")


def test_copies_of_checkpoints_have_names_of_their_own(served: Served) -> None:
    served.push(1)
    served.do(lambda batch: batch.checkpoint(header(2, 1), "one", b"\x01" * 16))
    served.push(3, step=1)
    served.do(lambda batch: batch.checkpoint(header(4, 2), "two"))
    copy = ShardChange.copy_checkpoint
    assert served.do(lambda batch: copy(batch, header(5), "copy", "one")) is True
    assert served.do(lambda batch: copy(batch, header(5), "copy", "one")) is False  # a duplicate
    assert served.do(lambda batch: copy(batch, header(6), "copy", "one")) is True  # the same again
    with pytest.raises(InvalidRequestError, match="checkpoint 'copy' is another one than 'two': choose another name"):
        served.do(lambda batch: copy(batch, header(7), "copy", "two"))
    with pytest.raises(NoTableError, match="no checkpoint 'three'"):
        served.do(lambda batch: copy(batch, header(7), "more", "three"))
    with pytest.raises(NoTableError, match="checkpoint 'one' was replaced by another of its name"):
        served.do(lambda batch: copy(batch, header(7), "more", "one", b"\x02" * 16))
    assert {known.name: known.checkpoint_id for known in served.shard.state.checkpoints} == {
        "one": b"\x01" * 16,
        "copy": b"\x01" * 16,
        "two": b"",
    }


def test_a_restored_shard_accepts_no_writer_before_a_session(served: Served, tmp_path: Path) -> None:
    """It has the epoch of its backup, of which a writer may still run."""
    with served.storage.write() as txn:
        records.write_state(txn, replace(records.read_state(txn), session_id=""))
    served.close()
    with closing(Served(tmp_path)) as restored:
        with pytest.raises(FencedError, match=r"session 1 is not known, .*: open a session first"):
            restored.push(1)
        restored.do(lambda batch: batch.open_session("next", 2, SESSION_ID))
        assert restored.push(1, epoch=2) is True


def test_free_pages_beyond_the_end_of_the_file_are_valid(tmp_path: Path) -> None:
    """LMDB counts, but does not write, pages that one transaction allocates and frees, as a rollback does."""
    rolled_back = LmdbStorage(tmp_path)
    for generation, num_blocks, value in ((1, 300, bytes(1_500)), (3, 20, b"short")):
        with rolled_back.write() as txn:
            for block in range(num_blocks):
                put(txn, block, generation, value)
    with rolled_back.write() as txn:
        put(txn, 900, 1, bytes(50_000))
        put(txn, 7, 0, bytes(3_000))
        for version in list(txn.versions()):
            if version.generation:
                txn.delete_block(version)
    counted = (rolled_back._env.info()["last_pgno"] + 1) * 4096
    rolled_back.close()
    assert (tmp_path / "data.mdb").stat().st_size < counted
    check_pages(tmp_path / "data.mdb")
    again = LmdbStorage(tmp_path)
    with again.write() as txn:
        assert [get(txn, block) for block in (6, 7)] == [None, bytes(3_000)]
        for block in range(500):
            put(txn, block, 4, bytes(1_500))
    again.close()
    check_pages(tmp_path / "data.mdb")


def test_a_truncated_file_is_refused_or_complete(tmp_path: Path) -> None:
    """Reading a missing page would end the process."""
    cut = LmdbStorage(tmp_path)
    for first in (0, 3, 5, 5):
        with cut.write() as txn:
            for block in range(first, 6):
                put(txn, block, 0, bytes([block]) * 8_000)
    cut.close()
    data, whole = tmp_path / "data.mdb", (tmp_path / "data.mdb").read_bytes()
    num_refused = 0
    for num_bytes in range(len(whole) - 4096, 8192, -4096):
        data.write_bytes(whole[:num_bytes])
        try:
            found = LmdbStorage(tmp_path, readonly=True)
        except DamagedFileError:
            num_refused += 1
            continue
        with found.read() as txn:
            assert [(get(txn, block) or b"")[-1] for block in range(6)] == list(range(6))
        found.close()
    assert num_refused > 10


def test_a_check_that_is_killed_says_nothing_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(8192))
    monkeypatch.setattr(integrity, "_command", lambda data: ["sh", "-c", "kill -KILL $$"])
    with pytest.raises(StorageError, match=r"could not be checked \(exit status -9\)") as refused:
        integrity.check_end(tmp_path / "data.mdb")
    assert not isinstance(refused.value, DamagedFileError)


def test_a_shard_knows_its_ancestors(tmp_path: Path) -> None:
    """Every process that writes is a new incarnation; a process that only reads keeps the previous one."""
    marks: list[Any] = []
    for number in range(4):
        with closing(Served(tmp_path)) as served:
            if number == 0:
                served.do(lambda batch, served=served: batch.create_table(SPEC))
            served.shard.check_acknowledged(served.shard.state.mark)
            for mark in marks:
                served.shard.check_acknowledged(mark)
            if number != 2:
                served.do(lambda batch, n=number, served=served: batch.open_session("run", n + 1, SESSION_ID))
            marks.append(served.shard.state.mark)
            incarnation, commit = split_mark(marks[-1])
            for lost in (f"{incarnation}:{commit + 1}", f"{bytes(8).hex()}:0"):
                with pytest.raises(DataLossError, match="shard 0 lacks what it had acknowledged"):
                    served.shard.check_acknowledged(lost)
            if number == 3:
                lost = f"{split_mark(marks[0])[0]}:{split_mark(marks[0])[1] + 1}"
                with pytest.raises(DataLossError):  # of an incarnation of before
                    served.shard.check_acknowledged(lost)
    assert marks[1] == marks[2]
    assert len({split_mark(mark)[0] for mark in marks}) == 3


def test_lineages_are_cut_and_joined() -> None:
    first, second, third = (letter * 16 for letter in "abc")
    lineage = Lineage().joined([f"{first}:5", f"{second}:9"])
    assert lineage.up_to(f"{second}:7").marks == [f"{first}:5", f"{second}:7"]
    assert lineage.up_to(f"{first}:2").marks == [f"{first}:2"]
    assert lineage.up_to(f"{third}:1").marks == [f"{first}:5", f"{second}:9", f"{third}:1"]
    assert lineage.holds(f"{second}:9")
    assert not lineage.holds(f"{second}:10")
    long = Lineage().joined(f"{number:016x}:1" for number in range(MAX_ANCESTORS + 3))
    assert len(long.ancestors) == MAX_ANCESTORS
    assert long.holds(f"{MAX_ANCESTORS:016x}:1")
    several = Lineage.of_all([long.marks, [f"{first}:1", f"{second}:2"], [f"{number:016x}:9" for number in range(4)]])
    assert len(several.ancestors) == MAX_ANCESTORS
    assert all(several.holds(mark) for mark in [*long.marks[-1000:], f"{first}:1", f"{second}:2", f"{3:016x}:9"])


def test_checkpoints_are_limited_in_number_and_to_scheduled_steps(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MAX_CHECKPOINTS", 6)

    for number in range(1, 7):
        served.do(lambda batch, n=number: batch.checkpoint(header(n), f"kept {n}"))
    for sequence, refused in enumerate(("checkpoint", "copy_checkpoint"), start=7):
        more = ("kept 1",) if refused == "copy_checkpoint" else ()
        full = r"retains 6 checkpoints, the most .* 'kept 1', 'kept 2', .*'kept 5'"
        with pytest.raises(InvalidRequestError, match=full):
            served.do(
                lambda batch, n=sequence, call=refused, more=more: getattr(ShardChange, call)(
                    batch, header(n), "one more", *more
                )
            )
    served.do(lambda batch: batch.release(header(7), "kept 3"))
    served.do(lambda batch: batch.checkpoint(header(8, step=30), "one more"))
    served.do(lambda batch: batch.release(header(9), "kept 4"))
    with pytest.raises(
        StepError, match=r"needs the learning rates of 1000000000000 steps, the request has those of 30"
    ):
        served.do(lambda batch: batch.checkpoint(header(10, step=10**12), "far"))


def test_only_refusals_prove_that_a_write_was_not_applied() -> None:
    """Disk errors and unknown ones may follow a commit, and a wrong directory knows nothing of the right one."""
    proofs = {kind for kind in ERROR_OF_STATUS.values() if kind.not_applied}
    assert set(ERROR_OF_STATUS.values()) - proofs == {
        WeightServerError,
        ShardUnavailableError,
        StorageError,
        DataLossError,
        WrongShardError,
    }


def test_a_push_does_not_write_the_list_of_checkpoints(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a thousand of them."""
    served.do(lambda batch: batch.checkpoint(header(1), "kept"))
    written = []
    put_json = records.put_json
    monkeypatch.setattr(records, "put_json", lambda txn, key, value: (written.append(key), put_json(txn, key, value)))
    served.push(2)
    assert written == ["state"]


# ---- sweeping


def kept_versions(served: Served) -> dict[int, set[int]]:
    """Block -> the versions that the newest state and the checkpoints need, found one state at a time."""
    states = [NEWEST, *(kept.generation for kept in served.shard.state.checkpoints)]
    return {
        block: {max(version for version in versions if version <= state) for state in states if min(versions) <= state}
        for block, versions in all_versions(served).items()
    }


def all_versions(served: Served) -> dict[int, set[int]]:
    versions: dict[int, set[int]] = {}
    with served.storage.read() as txn:
        for block, generation in stored(txn):
            versions.setdefault(block, set()).add(generation)
    return versions


def sweep(served: Served, seconds: float = 1.0) -> int:
    """Sweeps until all is swept; returns the number of transactions."""
    count = 0
    while not served.sweeper.is_done:
        served.sweeper.sweep(seconds)
        count += 1
    return count


def test_many_checkpoints_and_versions_are_each_looked_at_once() -> None:
    """A write looks for unneeded versions of each of its blocks."""
    chance, looks = random.Random(0), 0

    class Kept:
        def __init__(self, generation: int) -> None:
            self._generation = generation

        @property
        def generation(self) -> int:
            nonlocal looks
            looks += 1
            return self._generation

    kept, written = (sorted(chance.sample(range(3_000), 1_000)) for _ in range(2))
    versions = [Version(0, generation, 0) for generation in reversed(written)]
    found = unneeded(versions, [Kept(generation) for generation in kept])
    assert looks == len(kept)
    ends = dict(itertools.pairwise(written))
    wanted = [one for one in versions[1:] if not set(range(one.generation, ends[one.generation])) & {*kept}]
    assert found == wanted


@pytest.mark.parametrize(("seed", "seconds"), [(0, 1.0), (1, 0.0), (2, 0.0)])
def test_a_sweep_deletes_exactly_the_unneeded_versions(
    seed: int, seconds: float, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any order of writes, checkpoints, copies, releases, rollbacks and restarts, with partial and complete sweeps."""
    monkeypatch.setattr(changes, "_DELETED_AT_ONCE", 3)
    chance, sequence, names = random.Random(seed), itertools.count(1), [f"name {number}" for number in range(6)]
    rows_of: dict[str, np.ndarray] = {}
    num_swept = 0

    def change(method: Callable[..., object], *arguments: object) -> None:
        number = next(sequence)
        step = 1 if method is ShardChange.checkpoint else 0
        served.do(lambda batch: method(batch, header(number, step), *arguments))

    for _ in range(150):
        kept = [known.name for known in served.shard.state.checkpoints]
        free = [name for name in names if name not in kept]
        event = chance.choice(
            ["write"] * 5 + ["checkpoint", "copy", "release", "release", "rollback", "sweep", "start"]
        )
        if event == "write":
            rows = np.array(sorted(chance.sample(range(100), 5)), np.int64)
            change(ShardChange.push_gradients, rows, np.ones((5, 4), np.float32))
        elif event == "checkpoint" and free:
            change(ShardChange.checkpoint, free[0])
            rows_of[free[0]] = served.weights()
        elif event == "copy" and free and kept:
            source = chance.choice(kept)
            change(ShardChange.copy_checkpoint, free[0], source)
            rows_of[free[0]] = rows_of[source]
        elif event == "release" and kept:
            change(ShardChange.release, chance.choice(kept))
        elif event == "rollback" and kept and chance.random() < 0.3:
            name = chance.choice(kept)
            change(ShardChange.rollback, name)
            assert np.array_equal(served.weights(), rows_of[name])
        elif event == "start":
            served.shard = Shard(served.storage, shard=0, num_shards=1)
            served.committer.close()
            served.committer = Committer(served.shard.batch)
            served.sweeper = Sweeper(served.shard, served.committer)
        elif event == "sweep":
            before, needed = all_versions(served), kept_versions(served)
            now, mark = served.weights(), served.shard.state.mark
            if chance.random() < 0.5 and not served.sweeper.is_done:
                served.sweeper.sweep(0.0)  # a part
                assert all(all_versions(served)[block] >= needed[block] for block in before)
            sweep(served, seconds)
            assert all_versions(served) == needed
            num_swept += before != needed
            assert np.array_equal(served.weights(), now)
            assert served.shard.state.mark == mark, "no client takes its absence for a loss"
            for known in served.shard.state.checkpoints:
                chunks = served.shard.fetch(np.arange(100), step=None, state=False, checkpoint=known.name)
                assert np.array_equal(decoded(chunks, SPEC).weight, rows_of[known.name])
    assert num_swept, "nothing was ever deleted"


def test_a_release_in_one_transaction_with_a_checkpoint_is_swept(served: Served) -> None:
    """Two clients' operations may be of one group: there are as many checkpoints as before."""
    served.push(1)
    served.do(lambda batch: batch.checkpoint(header(2, 1), "old"))
    served.push(3, step=1)
    sweep(served)
    served.do(lambda batch: batch.release(header(4), "old") and batch.checkpoint(header(5, 2), "new"))
    assert all_versions(served) != kept_versions(served)
    sweep(served)
    assert all_versions(served) == kept_versions(served)


def test_a_volume_that_cannot_be_asked_stops_no_sweep(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeper looks at readers too, each time before it sweeps."""

    def statvfs(path: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.01)
    with closing(served.sweeper):
        served.sweeper.start()
        wait_until(lambda: served.sweeper.is_done)


def test_the_sweeper_sweeps_in_small_pieces_with_pauses_and_after_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(sweeper, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(sweeper, "SHARE", 0.5)  # a pause is as long as the piece before it, even on a slow disk
    served.push(1)
    served.do(lambda batch: batch.checkpoint(header(2, 1), "one"))
    served.push(3)
    monkeypatch.setattr(sweeper, "_RETRY_SECONDS", 0.01)
    errors = iter([OSError(errno.EIO, "Input/output error")])
    submit = served.committer.submit

    def failing_once(operation: Callable[[ShardChange], None]) -> CancellableFuture[None]:
        error = None if threading.current_thread() is threading.main_thread() else next(errors, None)

        def fails(batch: ShardChange) -> None:
            operation(batch)
            if error:
                raise error

        return submit(fails)

    monkeypatch.setattr(served.committer, "submit", failing_once)
    served.sweeper.start()
    served.do(lambda batch: batch.release(header(4), "one"))
    wait_until(lambda: served.sweeper.is_done)
    served.sweeper.close()
    assert next(errors, None) is None
    assert all_versions(served) == {0: {1}, 8: {1}}


def test_a_sweeper_that_ends_with_its_shard_warns_of_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.0)

    def ends() -> None:
        served.sweeper.close()
        raise StorageError("the directory is closed: the shard is shutting down")

    monkeypatch.setattr(served.storage, "look_at_readers", ends)
    served.sweeper._run()
    assert caplog.text == ""
