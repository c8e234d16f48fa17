"""Checkpoints of real shards: what they keep, what a rollback restores, what a release frees."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.comparing import same
from tests.helpers.fake_context import FakeContext
from tests.helpers.operations import Weightserver, assert_one_line
from tests.helpers.stored import put
from tests.integration.handlers import Handlers, handlers
from tests.integration.tables import SLOW, begin
from weightserver import (
    Checkpoint,
    FencedError,
    InvalidRequestError,
    LocalCluster,
    NoTableError,
    RowState,
    StepError,
    TableSpec,
    WeightClient,
)
from weightserver.client.connection import ShardConnection
from weightserver.operations.export import export_rows
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import rows_to_proto
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.lmdb_transaction import LmdbTransaction

SPEC = TableSpec(num_rows=1_000, dim=16, rows_per_block=7)
ROWS = np.arange(SPEC.num_rows)


@pytest.fixture
def writer(client: WeightClient) -> WeightClient:
    begin(client, SPEC, session="checkpoints")
    return client


def push(client: WeightClient, step: int, rows: np.ndarray = ROWS) -> None:
    gradients = np.random.default_rng(step).standard_normal((len(rows), SPEC.dim)).astype(np.float32)
    client.push_gradients(rows, gradients, step=step)


def test_a_checkpoint_stays_readable_and_can_be_returned_to(writer: WeightClient) -> None:
    push(writer, 0, ROWS[:500])
    before, num_bytes = writer.fetch_state(ROWS), writer.describe().disk_bytes
    writer.checkpoint("early", step=1)
    assert writer.describe().disk_bytes - num_bytes < 40_000, "a commit, and no copy of 500 rows"
    push(writer, 1, ROWS[300:800])
    between = writer.fetch_state(ROWS)
    writer.checkpoint("late", step=2)
    push(writer, 2)
    assert writer.checkpoints() == [Checkpoint("early", 1), Checkpoint("late", 2)]
    assert same(writer.fetch_state(ROWS, checkpoint="early"), before)
    assert same(writer.fetch_state(ROWS, checkpoint="late"), between)
    corrected = writer.fetch(ROWS, step=50, checkpoint="early")
    writer.rollback("late")
    assert same(writer.fetch_state(ROWS), between)
    assert writer.checkpoints() == [Checkpoint("early", 1), Checkpoint("late", 2)]
    writer.rollback("early")
    assert same(writer.fetch_state(ROWS), before)
    assert np.array_equal(writer.fetch(ROWS, step=50), corrected)
    info = writer.describe()
    assert (info.clock, info.rows_stored) == (1, 500)
    assert writer.checkpoints() == [Checkpoint("early", 1)]
    push(writer, 1, ROWS[300:800])  # and again, as if nothing had happened
    assert same(writer.fetch_state(ROWS), between)


def test_bad_names_and_steps(writer: WeightClient) -> None:
    writer.checkpoint("one", step=3)
    writer.checkpoint("one", step=3)
    with pytest.raises(InvalidRequestError, match="checkpoint 'one' was taken at step 3"):
        writer.checkpoint("one", step=4)
    for call in (writer.rollback, writer.release, lambda name: writer.fetch([1], step=1, checkpoint=name)):
        with pytest.raises(NoTableError, match="checkpoint 'two'"):
            call("two")
    for name in ("", "n" * 257):
        with pytest.raises(ValueError, match="name"):
            writer.checkpoint(name, step=3)
    with pytest.raises(ValueError, match=r"step must lie in 0\.\."):
        writer.checkpoint("x", step=-1)
    push(writer, 4, ROWS[7:14])  # of shard 1, which is asked last
    with pytest.raises(StepError, match=r"of 5 steps, so the rows of checkpoint 'x' could not be read before"):
        writer.checkpoint("x", step=4)
    kept = [[kept.name for kept in shard.checkpoints] for shard in writer.describe().shards]
    assert kept == [["one"], ["one"]], "a shard keeps what the other one refused"
    writer.checkpoint("x", step=5)
    writer.fetch(ROWS, step=5, checkpoint="x")
    writer.drop_table()
    assert writer.checkpoints() == []


@pytest.fixture
def before_shard_1(
    writer: WeightClient, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> list[Callable[[WeightClient], object]]:
    """What another client of the session does, once, when shard 0 has taken a checkpoint and shard 1 has not."""
    actions, call = list[Callable[[WeightClient], object]](), ShardConnection.call

    def acts(self: ShardConnection, method: str, request: Any, **options: Any) -> Any:
        if method == "Checkpoint" and self.shard == 1 and actions:
            with WeightClient(cluster.addresses) as other:
                other.open_session("test", join=writer.describe().epoch)
                actions.pop()(other)
        return call(self, method, request, **options)

    monkeypatch.setattr(ShardConnection, "call", acts)
    return actions


def test_a_checkpoint_request_that_comes_late_takes_no_later_rows(
    writer: WeightClient, before_shard_1: list[Callable[[WeightClient], object]]
) -> None:
    push(writer, 0)
    before_shard_1.append(lambda other: push(other, 0))
    with pytest.raises(InvalidRequestError, match=r"shard 1 at .* rows were written since .*'half' was begun"):
        writer.checkpoint("half", step=1)
    assert writer.checkpoints() == []
    writer.checkpoint("whole", step=1)
    assert writer.checkpoints() == [Checkpoint("whole", 1)]


def test_a_checkpoint_is_taken_by_a_shard_that_restarts_meanwhile(
    writer: WeightClient, cluster: LocalCluster, before_shard_1: list[Callable[[WeightClient], object]]
) -> None:
    """Its last commit, as of what releases a checkpoint, was made after the request's marks and changed no row."""
    push(writer, 0)
    writer.checkpoint("before", step=1)
    before_shard_1.append(lambda other: (other.release("before"), cluster.restart(1)))
    writer.checkpoint("whole", step=1)
    assert writer.checkpoints() == [Checkpoint("whole", 1)]


def test_a_reader_keeps_to_the_checkpoint_that_it_began_with(writer: WeightClient) -> None:
    push(writer, 0)
    writer.checkpoint("first", step=1)
    push(writer, 1)
    writer.checkpoint("again", step=2)
    (_, meant) = writer.checkpoints()
    writer.fetch(ROWS, step=2, checkpoint=meant)
    writer.rollback("first")
    push(writer, 1, ROWS[:500])
    writer.checkpoint("again", step=2)
    assert writer.checkpoints()[1] == meant, "of the same name and step"
    with pytest.raises(NoTableError, match="checkpoint 'again' was replaced by another of its name"):
        writer.fetch(ROWS, step=2, checkpoint=meant)
    writer.fetch(ROWS, step=2, checkpoint="again")


def test_a_rollback_refused_by_every_shard_stops_no_writer(
    writer: WeightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is released between the look-up and the request."""
    push(writer, 0)
    writer.checkpoint("gone", step=1)
    (kept,) = writer.checkpoints()
    writer.release("gone")
    monkeypatch.setattr("weightserver.client.client.checkpoint_in", lambda answers, name: kept)
    with pytest.raises(NoTableError, match="there is no checkpoint 'gone'"):
        writer.rollback("gone")
    push(writer, 1)


class Looking:
    """A shard whose look for lost writes, before a checkpoint, lasts until `go`."""

    def __init__(self, served: Handlers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shard, self.service = served.shard, served.service
        self.began, self.go, self.num_looks = threading.Event(), threading.Event(), 0
        served.do(lambda batch: batch.create_table(SPEC))
        served.do(lambda batch: batch.open_session("run", 1, b"o" * 16))
        look = LmdbTransaction.check_contents

        def slowly(txn: LmdbTransaction) -> None:
            self.num_looks += 1
            self.began.set()
            assert self.go.wait(60)
            look(txn)

        monkeypatch.setattr(LmdbTransaction, "check_contents", slowly)

    def header(self, writer: bytes, step: int) -> pb.WriteHeader:
        rates = pb.Rates(learning_rates=SLOW[:5].tobytes())
        return pb.WriteHeader(epoch=1, session_id=b"o" * 16, writer=writer, sequence=1, step=step, rates=rates)

    def push(self) -> bool:
        header, rows = self.header(b"p" * 16, 0), rows_to_proto(np.arange(2))
        header.num_rows, header.num_blocks = 2, 1
        message = pb.PushGradientsRequest(header=header, rows=rows, gradients=bytes(2 * 4 * SPEC.dim))
        return not self.service.PushGradients(iter([message]), FakeContext()).duplicate

    def checkpoint(self, context: FakeContext) -> bool:
        request = pb.CheckpointRequest(header=self.header(b"c" * 16, 1), name="kept", identity=b"i" * 16)
        return not self.service.Checkpoint(request, context).duplicate


@pytest.fixture
def looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Looking]:
    with closing(LmdbStorage(tmp_path)) as storage, handlers(storage) as served:
        yield Looking(served, monkeypatch)


def test_writes_go_on_while_a_checkpoint_looks_for_lost_ones(looking: Looking) -> None:
    with ThreadPoolExecutor(1) as pool:
        checkpoint = pool.submit(looking.checkpoint, FakeContext())
        assert looking.began.wait(60)
        assert looking.push()
        assert looking.shard.state.rows_stored == 2, "and is acknowledged"
        assert not looking.shard.state.checkpoints
        looking.go.set()
        assert checkpoint.result(60)
    assert looking.shard.state.checkpoints[0].rows_stored == 2


def test_a_checkpoint_that_is_repeated_meanwhile_looks_no_further(
    looking: Looking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first call's deadline passed during the look: otherwise none of them would ever be in time."""
    arrived, lock = threading.Semaphore(0), threading.Lock()

    class Noticed:
        def __enter__(self) -> None:
            arrived.release()
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    monkeypatch.setattr(looking.shard, "_checking", Noticed())
    gone = FakeContext(is_gone=True)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(looking.checkpoint, gone)
        assert looking.began.wait(60)
        second = pool.submit(looking.checkpoint, FakeContext())
        for _ in range(2):
            assert arrived.acquire(timeout=60)
        looking.go.set()
        with pytest.raises(CancelledError):
            first.result(60)
        assert second.result(60)
    assert looking.num_looks == 1
    assert [kept.name for kept in looking.shard.state.checkpoints] == ["kept"]


def test_a_killed_reader_holds_no_space(tmp_path: Path) -> None:
    """For example one of LMDB's own tools with a snapshot open; the shard continues and reuses freed pages."""
    code = (
        "import sys, os, lmdb\n"
        "with lmdb.open(sys.argv[1], readonly=True, max_dbs=5, lib_version=0).begin() as txn:\n"
        "    next(iter(txn.cursor())); os.kill(os.getpid(), 9)"
    )
    kept = LmdbStorage(tmp_path)
    sizes = []
    for number in range(200):
        with kept.write() as txn:
            for block in range(20):
                put(txn, block, 0, bytearray(8_000))
        if number == 20:
            assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
            kept.look_at_readers()
        sizes.append(kept.disk_bytes())
    assert sizes[-1] <= 1.5 * sizes[19]
    kept.close()


@pytest.mark.guard
def test_space_of_released_checkpoints_is_reused(writer: WeightClient) -> None:
    """With three checkpoints kept over thirty steps that write everything, the file stops growing.

    Writes do not wait for sweeps, so the file may hold a few versions more than are needed; without sweeps it would be
    three times as long."""
    sizes = []
    for step in range(30):
        push(writer, step)
        writer.checkpoint(f"step {step}", step=step + 1)
        if step >= 3:
            writer.release(f"step {step - 3}")
        sizes.append(writer.describe().disk_bytes)
    assert len(writer.checkpoints()) == 3
    assert sizes[-1] <= 2 * sizes[9]


@pytest.mark.parametrize("file_format", ["safetensors", "npz"])
def test_a_checkpoint_is_exported_while_training_continues(
    file_format: str, writer: WeightClient, cluster: LocalCluster, tmp_path: Path
) -> None:
    push(writer, 0, ROWS[::3])
    writer.checkpoint("kept", step=4)
    kept = writer.fetch_state(ROWS, step=4)
    done = threading.Event()

    def train() -> int:
        step = 4
        while not done.is_set() and step < len(SLOW):
            push(writer, step)
            step += 1
        return step

    with ThreadPoolExecutor(1) as pool, WeightClient(cluster.addresses) as reader:
        training = pool.submit(train)
        written = export_rows(reader, tmp_path / "out", checkpoint="kept", file_format=file_format, rows_per_file=300)
        done.set()
        assert training.result(60) > 4
    assert [path.name for path in written] == [
        f"rows-{first:012d}-{min(first + 299, 999):012d}.{file_format}" for first in range(0, 1000, 300)
    ]
    assert sorted(written) == sorted((tmp_path / "out").iterdir())
    files = [load_file(path) if file_format == "safetensors" else dict(np.load(path)) for path in written]
    columns = {name: np.concatenate([file[name] for file in files]) for name in ("row", *vars(kept))}
    assert np.array_equal(columns.pop("row"), ROWS)
    assert same(RowState(**columns), kept)


def test_the_command_line_lists_and_rolls_back(
    writer: WeightClient, cluster: LocalCluster, weightserver: Weightserver
) -> None:
    push(writer, 0)
    kept = writer.fetch_state(ROWS)
    writer.checkpoint("kept", step=1)
    push(writer, 7)

    assert weightserver("checkpoints", *cluster.addresses) == (0, "kept\tstep 1\n", "")
    assert_one_line(weightserver("rollback", "lost", *cluster.addresses), "no checkpoint 'lost' on all shards")
    would = "would undo run 'checkpoints' from step 8 to 1: give --yes"
    assert_one_line(weightserver("rollback", "kept", *cluster.addresses), would)
    assert weightserver("rollback", "kept", *cluster.addresses, "--yes") == (0, "rolled back to step 1\n", "")
    assert same(writer.fetch_state(ROWS), kept)
    with pytest.raises(FencedError):
        push(writer, 8)


def test_a_checkpoint_of_some_shards_only_is_told_and_can_be_forgotten(
    writer: WeightClient, cluster: LocalCluster, weightserver: Weightserver
) -> None:
    """As one is left by a checkpoint() that a shard refused or never heard of: here it has forgotten it."""
    writer.checkpoint("half", step=0)
    forget = pb.CheckpointRequest(name="half", header=writer._writer.header(2))
    writer.call_shard(0, "Release", forget)

    status, listed, remark = weightserver("checkpoints", *cluster.addresses)
    assert (status, listed) == (0, "")
    who = "only shards [1] keep checkpoint 'half'"
    assert f"{who}: 'weightserver release' forgets it if a checkpoint() failed\n" in remark
    message = f"{who}, as after a checkpoint() that failed on others"
    assert_one_line(weightserver("rollback", "half", *cluster.addresses, "--yes"), message)
    with pytest.raises(NoTableError, match=r"only shards \[1\] keep checkpoint 'half'"):
        writer.rollback("half")
    assert weightserver("release", "half", *cluster.addresses) == (0, "released half\n", "")
    assert weightserver("checkpoints", *cluster.addresses) == (0, "", "none yet\n")
