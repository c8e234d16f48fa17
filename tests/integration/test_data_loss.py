"""Misplaced directories and addresses, and errors with an unknown outcome: nothing acknowledged is lost or counted
twice without an error. Uses real shards, and SGD with rate 1 without decay, so that each push counts -1.
"""

from __future__ import annotations

import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from safetensors import safe_open

from tests.helpers.comparing import same
from tests.helpers.raw_calls import raw_channel, stub
from tests.helpers.watching import frozen
from tests.integration.tables import begin
from weightserver import (
    ClusterError,
    DataLossError,
    FencedError,
    LocalCluster,
    TableMismatchError,
    TableSpec,
    WeightClient,
    WrongShardError,
)
from weightserver.client.fetched_rows import FetchedRows
from weightserver.operations.backup import backup
from weightserver.operations.export import export_rows
from weightserver.operations.reshard import reshard
from weightserver.operations.restore import restore
from weightserver.protocol._generated import weight_server_pb2 as pb

SPEC = TableSpec(num_rows=40, dim=2, momentum=0.0, weight_decay=0.0, init_std=0.0, rows_per_block=5)
ROWS = np.arange(SPEC.num_rows)
ONES = np.ones((SPEC.num_rows, SPEC.dim), np.float32)


class Place:
    """Two shards, their directories, and a client with a session."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cluster = LocalCluster(2, directory)
        self.client = self.connect()
        begin(self.client, SPEC, np.ones(100, np.float32))

    def connect(self, *, retry_seconds: float = 20) -> WeightClient:
        return WeightClient(self.cluster.addresses, timeout_seconds=5, retry_seconds=retry_seconds)

    def push(self, step: int = 0) -> None:
        self.client.push_gradients(ROWS, ONES, step=step)

    def kill(self, shard: int) -> None:
        self.cluster.processes[shard].kill()
        self.cluster.processes[shard].wait()

    def copy(self, shard: int, name: str) -> Path:
        """Copies the directory of a shard, which is stopped meanwhile."""
        self.cluster.processes[shard].terminate()
        self.cluster.processes[shard].wait()
        copied = self.directory / name
        shutil.copytree(self.directory / f"shard-{shard}", copied)
        self.cluster.restart(shard)
        return copied

    def replace(self, shard: int, source: Path) -> None:
        """Replaces the directory of a killed shard."""
        self.kill(shard)
        own = self.directory / f"shard-{shard}"
        own.rename(self.directory / f"replaced-{time.monotonic_ns()}")
        shutil.copytree(source, own)
        self.cluster.restart(shard)

    def close(self) -> None:
        self.client.close()
        self.cluster.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "cluster")
    yield place
    place.close()


# ---- older copies


def test_an_older_copy_of_a_directory_is_refused(place: Place) -> None:
    """Even after writes to it, so that its numbers have caught up."""
    place.push()
    older = place.copy(1, "older")
    place.push()
    newest = place.directory / "newest"
    shutil.copytree(place.directory / "shard-1", newest)  # as it is when the shard is killed
    place.replace(1, older)
    shard = place.client._shards.connections()[1]
    shard._retry_seconds = 0.3
    with place.connect() as other:  # it knows of nothing that was lost, and makes the copy catch up
        other.open_session("other", join=other.describe().epoch)
        for _ in range(2):
            other.push_gradients(ROWS, ONES, step=0)
    for call in (
        lambda: place.client.fetch(ROWS, step=1),
        lambda: place.client.push_gradients(ROWS[:5], ONES[:5], step=0),  # of shard 0, which is sound
        lambda: place.push(),
        lambda: place.push(1),
        lambda: place.client.checkpoint("after", step=1),
        lambda: place.client.describe(),
        lambda: place.client.open_session("again"),
    ):
        with pytest.raises(
            DataLossError, match=r"shard 1 .*lacks what it had acknowledged|stopped writing after a loss of data"
        ):
            call()
    with place.connect() as other:
        assert (other.fetch(np.arange(5), step=1) == -4).all(), "it stopped writing"
        assert other.checkpoints() == []
    place.replace(1, newest)
    shard._retry_seconds = 20.0
    place.client.open_session("again")
    place.push()
    found = place.client.fetch(ROWS, step=1)
    mine = (ROWS // SPEC.rows_per_block) % 2 == 1
    assert (found[mine] == -3).all(), "nothing that was acknowledged is missing"


def test_callers_that_know_of_other_writes_leave_a_shard_ready(place: Place) -> None:
    """Such as those of a run directory of another cluster: the shard has lost nothing."""
    place.push()
    with place.connect() as other, pytest.raises(DataLossError):
        other.expect(["0123456789abcdef:5"] * 2)
    for address in place.cluster.metrics_addresses:
        with urllib.request.urlopen(f"http://{address}/readyz") as answer:
            assert answer.read() == b"SERVING\n"


def assert_not_resharded(place: Place, target: Path) -> None:
    """By a client that knows nothing of the shards."""
    with (
        place.connect() as client,
        pytest.raises((ClusterError, DataLossError), match="take all shards to one checkpoint"),
    ):
        reshard(client, target, shard=0, num_shards=1, current=True)
    assert not target.exists()


@pytest.mark.guard
def test_later_clients_know_what_the_newest_checkpoint_held(place: Place) -> None:
    """They learn it from the other shard, and later acknowledgements from the marks that a client kept."""
    place.push()
    older = place.copy(1, "older")
    place.push()
    place.client.checkpoint("kept", step=1)
    newer = place.copy(1, "newer")
    place.push()
    marks = place.client.marks()
    place.replace(1, older)
    with place.connect() as later:
        for call in (lambda: later.open_session("later"), lambda: export_rows(later, place.directory / "exported")):
            with pytest.raises(
                DataLossError, match=r"shard 1 .* lacks what shard 0 knows it to have acknowledged: serve"
            ):
                call()
        assert later.describe().run == "run", "no session was fenced"
        assert not (place.directory / "exported").exists()
        assert_not_resharded(place, place.directory / "new")
        later.open_session("later", force=True)
    place.replace(1, newer)
    with place.connect() as later, pytest.raises(DataLossError, match="shard 1 lacks what it had acknowledged"):
        later.expect(marks)
    with place.connect() as later:
        later.open_session("later", force=True)
        later.rollback("kept")
        assert (later.fetch(ROWS, step=1) == -2).all()
    with place.connect() as later:
        later.open_session("since the rollback the shards are of one time")


# ---- two clusters


def test_shards_of_two_clusters_are_not_taken_as_one(place: Place, tmp_path: Path) -> None:
    """A wrong address fences no writer, and another cluster's directory receives none of the run's rows."""
    other = Place(tmp_path / "other")
    try:
        mixed = [place.cluster.addresses[0], other.cluster.addresses[1]]
        with WeightClient(mixed, retry_seconds=5) as client:
            for call in (
                lambda: client.describe(),
                lambda: client.open_session("mixed"),
                lambda: client.open_session("mixed", force=True),
                lambda: client.open_session("mixed", join=1),
                lambda: client.extend_table(50),
                lambda: client.fetch(ROWS, step=0),
            ):
                with pytest.raises(
                    ClusterError, match=r"shard 1 at .* holds the table of another cluster than shard 0"
                ):
                    call()
            with pytest.raises(ClusterError, match="hold tables of several clusters: give the addresses"):
                client.drop_table()
            with pytest.raises(TableMismatchError, match=r"shard 0 holds another table, .*: use its spec, or other"):
                client.create_table(replace(SPEC, seed=1))
        place.push()
        other.push()
        assert place.client.describe().epoch == other.client.describe().epoch == 1
        foreign = other.copy(1, "foreign")
        before = other.client.fetch_state(ROWS)
        place.replace(1, foreign)
        place.client._shards.connections()[1]._retry_seconds = 0.3
        with pytest.raises(WrongShardError, match=r"shard 1/2 of table \w+ answers, the call is for that of table"):
            place.push()
        with place.connect() as late, pytest.raises(ClusterError, match="of another cluster"):
            late.open_session("late")
        assert same(other.client.fetch_state(ROWS), before)
    finally:
        other.close()


@pytest.mark.guard
def test_a_session_is_more_than_its_number(place: Place) -> None:
    """The same epoch with another session id is another session, as when copies of both shards were served."""
    place.push()
    copy = place.copy(1, "copy")
    with place.connect(retry_seconds=2) as newer:
        assert newer.open_session("newer") == 2
        place.replace(1, copy)
        with raw_channel(place.cluster.addresses[1]) as channel:
            request = pb.OpenSessionRequest(name="of copies", epoch=2, session_id=b"c" * 16)
            stub(channel).OpenSession(request, timeout=60)
        with pytest.raises((FencedError, DataLossError)):
            newer.push_gradients(ROWS, ONES, step=0)
        with place.connect() as mistyped:
            for call in (mistyped.describe, lambda: mistyped.open_session("typo", force=True)):
                with pytest.raises(ClusterError, match=r"shard 1 .* is in another session 2 .* than shard 0"):
                    call()


# ---- errors with an unknown outcome


class Interrupted(BaseException):
    """An error raised by a signal handler."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_push_leaves_its_array_alone(place: Place) -> None:
    """The client's threads no longer read it, and the push counts once when it is repeated."""
    gradients = ONES.copy()
    with frozen(place.cluster, 1):
        with pytest.raises(Interrupted), interrupted_after(0.3):
            place.client.push_gradients(ROWS, gradients, step=0)
        gradients[:] = 100.0
    place.push()
    assert (place.client.fetch(ROWS, step=1) == -1).all()


@pytest.mark.guard
def test_an_interrupted_fetch_leaves_its_array_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.push()
    answers, store = SimpleQueue[None](), FetchedRows.add

    def stored(rows: FetchedRows, message: bytes) -> None:
        try:
            store(rows, message)
        finally:
            answers.put(None)

    monkeypatch.setattr(FetchedRows, "add", stored)
    out = np.zeros((SPEC.num_rows, SPEC.dim), np.float32)
    with frozen(place.cluster, 1):
        with pytest.raises(Interrupted), interrupted_after(0.3):
            place.client.fetch(ROWS, step=1, out=out)
        out[:] = 7.0
    for _ in place.cluster.addresses:  # the last one is the call's that was left
        answers.get(timeout=60)
    assert (out == 7.0).all()
    assert (place.client.fetch(ROWS, step=1) == -1).all()


# ---- shards of different times


@pytest.mark.guard
def test_a_restored_shard_without_a_later_checkpoint_is_not_taken_either(place: Place, tmp_path: Path) -> None:
    place.push()
    place.client.checkpoint("a", step=1)
    backup(place.client, tmp_path / "backup")
    place.push()
    restore(tmp_path / "backup", tmp_path / "restored", shard=1)
    place.replace(1, tmp_path / "restored")
    with place.connect() as later:
        for call in (lambda: later.open_session("later"), lambda: export_rows(later, tmp_path / "exported")):
            with pytest.raises((ClusterError, DataLossError), match="take all shards to one checkpoint"):
                call()
        assert_not_resharded(place, tmp_path / "new")
        (path,) = export_rows(later, tmp_path / "exported", checkpoint="a")
        with safe_open(path, "np") as file:
            assert (file.get_tensor("weight") == -1).all(), "a checkpoint is of one time"
        later.open_session("later", force=True)
        later.rollback("a")
        later.push_gradients(ROWS, ONES, step=0)
        assert (later.fetch(ROWS, step=1) == -2).all()
