"""Checkpoints of real shards: what they keep, what a rollback brings back, what a release frees."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from weightserver import (
    Checkpoint,
    FencedError,
    InvalidRequestError,
    LocalCluster,
    NoTableError,
    RowState,
    TableSpec,
    WeightClient,
)
from weightserver.cli import main
from weightserver.export import export_rows

SPEC = TableSpec(num_rows=1_000, dim=16, rows_per_block=7)
ROWS = np.arange(SPEC.num_rows)
RATES = np.full(100, 0.1, np.float32)


@pytest.fixture
def writer(client: WeightClient) -> WeightClient:
    client.create_table(SPEC)
    client.extend_schedule(0, RATES)
    client.open_session("checkpoints")
    return client


def push(client: WeightClient, step: int, rows: np.ndarray = ROWS) -> None:
    gradients = np.random.default_rng(step).standard_normal((len(rows), SPEC.dim)).astype(np.float32)
    client.push_gradients(rows, gradients, step=step)


def same(one: RowState, other: RowState) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


def test_a_checkpoint_stays_readable_and_can_be_returned_to(writer: WeightClient) -> None:
    push(writer, 0, ROWS[:500])
    before = writer.fetch_state(ROWS)
    writer.checkpoint("early", step=1)
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


def test_checkpoints_survive_a_restart() -> None:
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, RATES)
        client.open_session("run")
        push(client, 0)
        kept = client.fetch_state(ROWS)
        client.checkpoint("kept", step=1)
        push(client, 1)
        for shard in range(2):
            cluster.processes[shard].kill()
            cluster.processes[shard].wait()
            cluster.restart(shard)
        assert client.checkpoints() == [Checkpoint("kept", 1)]
        assert same(client.fetch_state(ROWS, checkpoint="kept"), kept)
        client.rollback("kept")
        assert same(client.fetch_state(ROWS), kept)


def test_a_checkpoint_needs_the_newest_session(writer: WeightClient, cluster: LocalCluster) -> None:
    push(writer, 0)
    writer.checkpoint("one", step=1)
    with WeightClient(cluster.addresses) as other:
        with pytest.raises(FencedError, match="no session is open"):
            other.rollback("one")
        other.open_session("another run")
        for call in (lambda: writer.checkpoint("two", step=1), lambda: writer.rollback("one")):
            with pytest.raises(FencedError, match="another run"):
                call()
        with pytest.raises(FencedError, match="another run"):
            writer.release("one")
        other.rollback("one")
        with pytest.raises(FencedError, match="another run"):
            push(writer, 1)
        assert other.describe().run == "another run"


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
    with pytest.raises(ValueError, match="step must not be negative"):
        writer.checkpoint("x", step=-1)
    writer.drop_table()
    assert writer.checkpoints() == []


def test_space_of_released_checkpoints_is_reused(writer: WeightClient) -> None:
    """Three checkpoints at a time, for forty steps that write everything: the file stops growing."""
    sizes = []
    for step in range(40):
        push(writer, step)
        writer.checkpoint(f"step {step}", step=step + 1)
        if step >= 3:
            writer.release(f"step {step - 3}")
        sizes.append(writer.describe().disk_bytes)
    assert len(writer.checkpoints()) == 3
    assert sizes[-1] <= 1.1 * sizes[9]


def test_a_checkpoint_costs_nothing_by_itself(writer: WeightClient) -> None:
    push(writer, 0)
    before = writer.describe().disk_bytes
    started = time.perf_counter()
    writer.checkpoint("one", step=1)
    assert time.perf_counter() - started < 5  # a commit; no copy of the rows
    assert writer.describe().disk_bytes - before < 100_000


@pytest.mark.parametrize("file_format", ["safetensors", "npz"])
def test_a_checkpoint_is_exported_while_training_goes_on(
    file_format: str, writer: WeightClient, cluster: LocalCluster, tmp_path: Path
) -> None:
    push(writer, 0, ROWS[::3])
    writer.checkpoint("kept", step=4)
    kept = writer.fetch_state(ROWS, step=4)
    done = threading.Event()

    def train() -> int:
        step = 4
        while not done.is_set() and step < len(RATES):
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


def test_the_command_line_exports(
    writer: WeightClient, cluster: LocalCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    push(writer, 0)
    directory = tmp_path / "out"

    def export(*arguments: str) -> tuple[int | str | None, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["export", *cluster.addresses, "--output", str(directory), *arguments])
        return stopped.value.code, *capsys.readouterr()

    for arguments, message in (
        (["--rows", "990:1001"], "rows 990:1001 do not exist: the table has rows 0:1000"),
        (["--rows", "5:5"], "rows 5:5 do not exist"),
        (["--rows", "five"], "'five' is no FIRST:END"),
        (["--checkpoint", "lost"], "there is no checkpoint 'lost' on all shards"),
        (["--step", "0"], "has seen 1 updates"),
    ):
        status, _, error = export(*arguments)
        assert status in (1, 2)
        assert message in error
    assert not list(directory.glob("*"))
    assert export("--rows", "3:8") == (0, f"wrote 1 files to {directory}\n", "")
    (path,) = directory.iterdir()
    with safe_open(path, "np") as file:
        assert file.metadata()["step"] == "1"
        assert np.array_equal(file.get_tensor("weight"), writer.fetch(ROWS[3:8], step=1))
    status, _, error = export()
    assert (status, "is not empty: give another directory" in error) == (1, True)


def test_the_command_line_lists_and_rolls_back(
    writer: WeightClient, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    push(writer, 0)
    kept = writer.fetch_state(ROWS)
    writer.checkpoint("kept", step=1)
    push(writer, 7)

    def run(*arguments: str) -> tuple[int | str | None, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([*arguments])
        return stopped.value.code, *capsys.readouterr()

    assert run("checkpoints", *cluster.addresses) == (0, "kept\tstep 1\n", "")
    status, _, error = run("rollback", "lost", *cluster.addresses)
    assert (status, error.count("\n")) == (1, 1)
    assert "no checkpoint 'lost' on all shards" in error
    status, _, error = run("rollback", "kept", *cluster.addresses)
    assert status == 1
    assert "would undo run 'checkpoints' from step 8 to 1: give --yes" in error
    assert run("rollback", "kept", *cluster.addresses, "--yes") == (0, "rolled back to step 1\n", "")
    assert same(writer.fetch_state(ROWS), kept)
    with pytest.raises(FencedError):
        push(writer, 8)
