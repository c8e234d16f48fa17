"""Misplaced directories and addresses, and errors with an unknown outcome: nothing acknowledged is lost or counted
twice without an error. Uses real shards, and SGD with rate 1 without decay, so that each push counts -1.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from tests.helpers.comparing import same
from weightserver import (
    ClusterError,
    DataLossError,
    FencedError,
    LocalCluster,
    NoTableError,
    ShardUnavailableError,
    TableMismatchError,
    TableSpec,
    WeightClient,
)
from weightserver.client.writer import Writer
from weightserver.operations.backup import backup
from weightserver.operations.export import export_rows
from weightserver.operations.reshard import Resharded, reshard
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
        self.client.create_table(SPEC)
        self.client.extend_schedule(0, np.ones(100, np.float32))
        self.client.open_session("run")

    def connect(self) -> WeightClient:
        return WeightClient(self.cluster.addresses, timeout_seconds=5, retry_seconds=20)

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

    def replace(self, shard: int, source: Path, *, whole: bool = True) -> None:
        """Replaces the directory, or only the data file, of a killed shard."""
        self.kill(shard)
        own = self.directory / f"shard-{shard}"
        if whole:
            own.rename(self.directory / f"replaced-{time.monotonic_ns()}")
            shutil.copytree(source, own)
        else:
            shutil.copy(source / "data.mdb", own / "data.mdb")
        self.cluster.restart(shard)

    def close(self) -> None:
        self.client.close()
        self.cluster.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "cluster")
    yield place
    place.close()


@contextmanager
def stopped(place: Place, shard: int) -> Iterator[None]:
    """Pauses the shard, which then does not answer but stays alive."""
    process = place.cluster.processes[shard]
    process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")
    while any(" T " not in (thread / "stat").read_text() for thread in threads.iterdir()):
        time.sleep(0.01)
    try:
        yield
    finally:
        place.cluster.processes[shard].send_signal(signal.SIGCONT)


# ---- older copies


@pytest.mark.guard
def test_an_older_copy_of_a_data_file_alone_is_refused_at_the_start(place: Place) -> None:
    place.push()
    older = place.copy(1, "older")
    place.push()
    with pytest.raises(ShardUnavailableError, match=r"data\.mdb lacks transactions that it had"):
        place.replace(1, older, whole=False)


@pytest.mark.parametrize("written_since", [1, pytest.param(37, marks=pytest.mark.guard)])
def test_an_older_copy_of_a_directory_is_refused(place: Place, written_since: int) -> None:
    """Even after writes to it, so that its numbers have caught up."""
    place.push()
    older = place.copy(1, "older")
    for _ in range(written_since):
        place.push()
    newest = place.directory / "newest"
    shutil.copytree(place.directory / "shard-1", newest)  # as it is when the shard is killed
    place.replace(1, older)
    with place.connect() as other:  # it knows of nothing that was lost, and makes the copy catch up
        other.open_session("other", join=other.describe().epoch)
        for _ in range(2 * written_since):
            other.push_gradients(ROWS, ONES, step=0)
    for call in (
        lambda: place.push(),
        lambda: place.push(1),
        lambda: place.client.fetch(ROWS, step=1),
        lambda: place.client.checkpoint("after", step=1),
        lambda: place.client.describe(),
        lambda: place.client.open_session("again"),
    ):
        with pytest.raises(
            DataLossError, match=r"shard 1 .*lacks what it had acknowledged|stopped writing after a loss of data"
        ):
            call()
    with place.connect() as other:
        written = -1 - 3 * written_since
        assert (other.fetch(np.arange(5), step=1) == written - 1).all(), (
            "shard 0 took the push that found out, no other"
        )
        assert other.checkpoints() == []
    place.replace(1, newest)
    place.client.open_session("again")
    place.push()
    found = place.client.fetch(ROWS, step=1)
    mine = (ROWS // SPEC.rows_per_block) % 2 == 1
    assert (found[mine] == -2 - written_since).all(), "nothing that was acknowledged is missing"


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
        with pytest.raises(DataLossError, match=r"shard 1 .* lacks what shard 0 knows it to have acknowledged: serve"):
            later.open_session("later")
        assert later.describe().run == "run", "no session was fenced"
        with pytest.raises(DataLossError, match=r"shard 1 .* lacks what shard 0 knows it to have acknowledged: serve"):
            export_rows(later, place.directory / "exported")
        assert not (place.directory / "exported").exists()
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


@pytest.mark.guard
def test_a_restart_and_a_complete_copy_are_not_losses(place: Place) -> None:
    place.push()
    place.kill(1)
    place.cluster.restart(1)
    place.push()
    newest = place.copy(1, "newest")
    place.replace(1, newest)
    place.push()
    assert (place.client.fetch(ROWS, step=1) == -3).all()


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
        place.push()
        other.push()
        assert place.client.describe().epoch == other.client.describe().epoch == 1
        foreign = other.copy(1, "foreign")
        before = other.client.fetch_state(ROWS)
        place.replace(1, foreign)
        with pytest.raises(DataLossError, match="or another directory, is in its place"):
            place.push()
        with place.connect() as late, pytest.raises(ClusterError, match="of another cluster"):
            late.open_session("late")
        assert same(other.client.fetch_state(ROWS), before)
    finally:
        other.close()


@pytest.mark.guard
def test_a_session_is_more_than_its_number(place: Place) -> None:
    """The same epoch with another session id is another session, as if a copy of both shards was served meanwhile."""
    place.push()
    copies = [place.copy(shard, f"copy-{shard}") for shard in range(2)]
    with place.connect() as newer:
        newer.open_session("newer")
        for shard, source in enumerate(copies):
            place.replace(shard, source)
        with place.connect() as third:
            assert third.open_session("third") == 2
            with pytest.raises((FencedError, DataLossError)):
                newer.push_gradients(ROWS, ONES, step=0)
            assert (third.fetch(ROWS, step=1) == -1).all()


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


@pytest.mark.parametrize("shard", [pytest.param(0, marks=pytest.mark.guard), 1])
def test_an_interrupted_push_is_repeated_once(place: Place, shard: int) -> None:
    """Whichever shard it waits for, the client's threads no longer use the caller's arrays."""
    for number in range(3):
        gradients = ONES.copy()
        with stopped(place, shard):
            with pytest.raises(Interrupted), interrupted_after(0.3):
                place.client.push_gradients(ROWS, gradients, step=0)
            gradients[:] = 100.0
        place.push()
        assert (place.client.fetch(ROWS, step=1) == -1 - number).all()
    place.client.checkpoint("after", step=1)
    place.client.rollback("after")
    place.push()
    assert (place.client.fetch(ROWS, step=1) == -4).all()


@pytest.mark.guard
def test_a_write_that_failed_is_repeated_in_the_next_session(place: Place) -> None:
    """The shards know the writer in any session."""
    with stopped(place, 1), pytest.raises(Interrupted), interrupted_after(0.3):
        place.push()
    place.client.open_session("again")
    place.push()
    assert (place.client.fetch(ROWS, step=1) == -1).all()


@pytest.mark.guard
def test_an_interrupted_fetch_leaves_its_array_alone(place: Place) -> None:
    place.push()
    out = np.zeros((SPEC.num_rows, SPEC.dim), np.float32)
    with stopped(place, 1):
        with pytest.raises(Interrupted), interrupted_after(0.3):
            place.client.fetch(ROWS, step=1, out=out)
        out[:] = 7.0
    assert (place.client.fetch(ROWS, step=1) == -1).all()
    assert (out == 7.0).all()


@pytest.mark.guard
def test_a_session_opened_during_a_push_counts_it_once(place: Place) -> None:
    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 6):
            with stopped(place, 1):
                pushing = pool.submit(place.push)
                time.sleep(0.1 * (number % 3))
                opening = pool.submit(place.client.open_session, "again")
                time.sleep(0.1)
            opening.result(30)
            if pushing.exception(30) is not None:
                place.push()
            assert (place.client.fetch(ROWS, step=1) == -number).all()


@pytest.mark.guard
def test_a_write_that_failed_is_repeated_in_another_clients_session(place: Place) -> None:
    """It is on one of two shards, which nobody else can know: the client makes no other write before."""
    with stopped(place, 1), pytest.raises(Interrupted), interrupted_after(0.3):
        place.push()
    with place.connect() as other:
        epoch = other.open_session("other")
        with pytest.raises(FencedError):
            place.push()
        place.client.open_session("other", join=epoch)
        place.push()
        place.client.push_gradients(ROWS, 2 * ONES, step=0)
        assert (place.client.fetch(ROWS, step=1) == -3).all()


# ---- shards of different times


def test_a_shard_restored_next_to_the_others_is_noticed(place: Place, tmp_path: Path) -> None:
    place.push()
    place.client.checkpoint("a", step=1)
    backup(place.client, tmp_path / "backup")
    place.push()
    place.client.release("a")
    place.client.checkpoint("b", step=2)
    restored = [tmp_path / f"restored-{shard}" for shard in range(2)]
    for shard, directory in enumerate(restored):
        restore(tmp_path / "backup", directory, shard=shard)
    place.replace(1, restored[1])
    with place.connect() as later:
        with pytest.raises(DataLossError, match=r"take all shards to one checkpoint .*restore all of them"):
            later.open_session("later")
        assert later.describe().run == "run"
    place.replace(0, restored[0])
    with place.connect() as later:
        later.open_session("later")
        later.rollback("a")
        assert (later.fetch(ROWS, step=1) == -1).all()


@pytest.mark.guard
def test_a_restored_shard_without_a_later_checkpoint_is_not_taken_either(place: Place, tmp_path: Path) -> None:
    place.push()
    place.client.checkpoint("a", step=1)
    backup(place.client, tmp_path / "backup")
    place.push()
    restore(tmp_path / "backup", tmp_path / "restored", shard=1)
    place.replace(1, tmp_path / "restored")
    with place.connect() as later:
        with pytest.raises((ClusterError, DataLossError), match="take all shards to one checkpoint"):
            later.open_session("later")
        with pytest.raises((ClusterError, DataLossError), match="take all shards to one checkpoint"):
            export_rows(later, tmp_path / "exported")
        (path,) = export_rows(later, tmp_path / "exported", checkpoint="a")
        with safe_open(path, "np") as file:
            assert (file.get_tensor("weight") == -1).all(), "a checkpoint is of one time"
        later.open_session("later", force=True)
        later.rollback("a")
        later.push_gradients(ROWS, ONES, step=0)
        assert (later.fetch(ROWS, step=1) == -2).all()


@pytest.mark.guard
def test_a_shard_restored_again_from_the_backup_of_all_is_not_taken(place: Place, tmp_path: Path) -> None:
    """The other shards have been written to since all were restored from it."""
    place.push()
    place.client.checkpoint("a", step=1)
    backup(place.client, tmp_path / "backup")
    for shard in range(2):
        restore(tmp_path / "backup", tmp_path / f"restored-{shard}", shard=shard)
        place.replace(shard, tmp_path / f"restored-{shard}")
    with place.connect() as later:
        later.open_session("later")
        later.push_gradients(ROWS, ONES, step=0)
    restore(tmp_path / "backup", tmp_path / "again", shard=1)
    place.replace(1, tmp_path / "again")
    with place.connect() as latest:
        with pytest.raises(DataLossError, match=r"shard 1 at .* lacks what shard 0 knows it to have acknowledged"):
            latest.open_session("latest")
        latest.open_session("latest", force=True)
        latest.rollback("a")


@pytest.mark.guard
@pytest.mark.parametrize("restored", [False, True])
def test_a_session_opened_halfway_reopens_without_force(place: Place, tmp_path: Path, restored: bool) -> None:
    place.push()
    if restored:
        place.client.checkpoint("a", step=1)
        backup(place.client, tmp_path / "backup")
        for shard in range(2):
            restore(tmp_path / "backup", tmp_path / f"restored-{shard}", shard=shard)
            place.replace(shard, tmp_path / f"restored-{shard}")
    place.kill(1)
    with WeightClient(place.cluster.addresses, retry_seconds=1) as other:
        place.cluster.restart(1)
        assert other.describe().epoch == 1
        place.kill(1)
        described, half = other.call_shard(0, "Describe", pb.DescribeRequest()), b"h" * 16
        other.call_shard(
            0, "OpenSession", pb.OpenSessionRequest(name="half", epoch=described.epoch + 1, session_id=half)
        )
    place.cluster.restart(1)
    with place.connect() as later:
        later.open_session("later")
        later.push_gradients(ROWS, ONES, step=0)
        assert (later.fetch(ROWS, step=1) == -2).all()


# ---- rows of several times


def dies_in_rollback(place: Place, monkeypatch: pytest.MonkeyPatch, shard: int) -> None:
    """A shard dies after the client has described the shards."""
    send = Writer.send

    def without_it(self: Writer, *arguments: Any, **options: Any) -> list[Any]:
        place.kill(shard)
        return send(self, *arguments, **options)

    place.client._shards.connections()[shard]._retry_seconds = 0.3
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "send", without_it)
        with pytest.raises(ShardUnavailableError):
            place.client.rollback("one")


@pytest.mark.parametrize("shard", [0, pytest.param(1, marks=pytest.mark.guard)])
def test_a_rollback_that_ended_halfway_leaves_no_common_state(
    place: Place, shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.push()
    place.client.checkpoint("one", step=1)
    place.push(1)
    epoch = place.client.describe().epoch
    with place.connect() as beside:
        beside.open_session("run", join=epoch)
        dies_in_rollback(place, monkeypatch, shard)
        place.cluster.restart(shard)
        with pytest.raises(
            ClusterError, match=r"was not rolled back .* together with shard 0, .*weightserver rollback"
        ):
            beside.checkpoint("of two times", step=2)
    with place.connect() as other:
        for call in (
            lambda: other.open_session("other"),
            lambda: other.join_newest_session() and other.rollback("two"),
        ):
            with pytest.raises((ClusterError, NoTableError)):
                call()
        other.open_session("other", force=True)
        other.rollback("one")
        other.open_session("other")
        assert (other.fetch(ROWS, step=1) == -1).all()
        other.extend_schedule(1, [1.0])
        other.push_gradients(ROWS, ONES, step=1)
        other.checkpoint("two", step=2)
    place.client.close()
    place.cluster.close()
    assert merged(place, tmp_path / "new").checkpoint is None


def merged(place: Place, target: Path) -> Resharded:
    """Compares the current rows on one shard."""
    return reshard([place.directory / f"shard-{shard}" for shard in range(2)], [target], current=True)


@pytest.mark.guard
def test_a_forced_session_opened_halfway_leaves_no_common_state(place: Place, tmp_path: Path) -> None:
    """A restored shard, or an older copy, would otherwise look like the other shards after that."""
    place.push()
    place.client.checkpoint("one", step=1)
    backup(place.client, tmp_path / "backup")
    place.push(1)
    place.kill(1)
    (place.directory / "shard-1").rename(tmp_path / "lost")
    restore(tmp_path / "backup", place.directory / "shard-1", shard=1)
    place.cluster.restart(1)
    with place.connect() as killed:
        killed.open_session("rollback to one", force=True)
    with place.connect() as other:
        with pytest.raises(ClusterError, match="weightserver rollback"):
            other.open_session("other")
        other.open_session("other", force=True)
        other.rollback("one")
        other.open_session("other")
        assert (other.fetch(ROWS, step=1) == -1).all()


@pytest.mark.guard
@pytest.mark.parametrize("restored", [False, True], ids=["older copy", "restored"])
def test_directories_of_several_times_are_not_resharded_as_they_are(
    place: Place, restored: bool, tmp_path: Path
) -> None:
    place.push()
    older = place.copy(1, "older")
    place.push()
    place.client.checkpoint("one", step=1)
    if restored:
        backup(place.client, tmp_path / "backup")
        restore(tmp_path / "backup", tmp_path / "restored", shard=1)
    place.push(1)
    place.client.close()
    place.cluster.close()
    newest = place.directory / "shard-1"
    newest.rename(tmp_path / "newest")
    shutil.copytree(tmp_path / "restored" if restored else older, newest)
    with pytest.raises(ValueError, match=r"their rows are of different times: give|is older than .*: give its newest"):
        merged(place, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    shutil.rmtree(newest)
    (tmp_path / "newest").rename(newest)
    assert merged(place, tmp_path / "new").step == 2


@pytest.mark.guard
def test_copies_of_a_cluster_are_not_taken_as_one(place: Place, tmp_path: Path) -> None:
    """Both have the same table."""
    place.client.close()
    place.cluster.close()
    shutil.copytree(place.directory, tmp_path / "copy")
    with LocalCluster(2, place.directory) as first, LocalCluster(2, tmp_path / "copy") as second:
        for cluster in first, second:
            with WeightClient(cluster.addresses) as client:
                client.extend_schedule(0, np.ones(10, np.float32))
                client.open_session("run")
                client.push_gradients(ROWS, ONES, step=0)
        with WeightClient([first.addresses[0], second.addresses[1]]) as mixed:
            for call in (mixed.describe, lambda: mixed.open_session("typo", force=True)):
                with pytest.raises(ClusterError, match=r"shard 1 .* is in another session 2 .* than shard 0"):
                    call()


def test_a_table_in_use_is_not_taken_into_another_cluster(place: Place, tmp_path: Path) -> None:
    """Even though none of its rows has been written."""
    with LocalCluster(2, tmp_path / "other") as other, WeightClient(other.addresses) as client:
        client.create_table(SPEC)
        with (
            WeightClient([other.addresses[0], place.cluster.addresses[1]]) as mistyped,
            pytest.raises(TableMismatchError, match=r"of epoch 1 \(run 'run'\): are all addresses of one cluster"),
        ):
            mistyped.create_table(SPEC)
    place.push()


@pytest.mark.guard
def test_a_checkpoint_taken_again_stays_one(place: Place) -> None:
    """Repeated, made by several clients at once, and interrupted halfway."""
    epoch = place.client.describe().epoch
    with place.connect() as other, ThreadPoolExecutor() as pool:
        other.open_session("run", join=epoch)
        for step in range(1, 30):
            place.push()
            name = f"step {step}"
            list(pool.map(lambda client, name=name: client.checkpoint(name, step=1), (place.client, other)))
            assert name in [known.name for known in place.client.checkpoints()]
        checkpoint_id = place.client.checkpoints()[-1].checkpoint_id
        place.kill(1)
        place.client._shards.connections()[1]._retry_seconds = 0.3
        with pytest.raises(ShardUnavailableError):
            place.client.checkpoint(name, step=1)
        place.cluster.restart(1)
        place.client._shards.connections()[1]._retry_seconds = 20
        place.push()
        assert place.client.checkpoints()[-1].checkpoint_id == checkpoint_id
        place.client.rollback(name)
