"""Training runs before, during and after operations on their shards."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.comparing import same
from tests.helpers.operations import Weightserver, targets_in
from tests.helpers.small_run import EVERY, NUM_IMAGES, ONLY_ROWS, losses, small_run
from trainer.loop import train
from trainer.run.checkpoint import Checkpoints
from weightserver import DataLossError, FencedError, LocalCluster, RowState, TableMismatchError, WeightClient
from weightserver.operations.restore import restore


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], RowState]:
    """Every loss of an undisturbed run, and its rows at the end."""
    torch.set_num_threads(1)
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        output = tmp_path_factory.mktemp("undisturbed") / "run"
        train(run_on(cluster, output))
        return losses(output), client.fetch_state(np.arange(NUM_IMAGES))


def run_on(cluster: LocalCluster, output: Path, **changes: Any) -> Any:
    return small_run(output, servers=",".join(cluster.addresses), encoder=ONLY_ROWS, **changes)


def assert_goes_on(
    cluster: LocalCluster, output: Path, undisturbed: tuple[list[float], RowState], **changes: Any
) -> None:
    """Resumes a run, and checks that it ends as the undisturbed one."""
    train(run_on(cluster, output, resume=True, **changes))
    expected, state = undisturbed
    assert losses(output) == expected
    with WeightClient(cluster.addresses) as client:
        assert same(client.fetch_state(np.arange(NUM_IMAGES)), state)


@pytest.mark.parametrize(
    "lost", [pytest.param([1], id="one shard"), pytest.param([0, 1, 2, 3], id="all shards", marks=pytest.mark.slow)]
)
@pytest.mark.guard
def test_a_run_resumes_after_lost_shards_are_restored(
    lost: list[int],
    undisturbed: tuple[list[float], RowState],
    weightserver: Weightserver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run has released the checkpoint of the last backup, an increment; the other shards are rolled back to it."""
    output, names = tmp_path / "run", [f"step-{number * EVERY:012d}" for number in range(2)]
    with LocalCluster(4, tmp_path / "servers") as cluster, WeightClient(cluster.addresses) as client:
        save = Checkpoints.save

        def save_and_back_up(checkpoints: Checkpoints, step: int, *arguments: Any) -> None:
            save(checkpoints, step, *arguments)
            if (number := step // EVERY) < len(names):
                shutil.copytree(output / "checkpoints", tmp_path / "files", dirs_exist_ok=True)
                options = ["--output", tmp_path / f"backups/{number}", "--checkpoint", names[number], "--incremental"]
                said = weightserver("backup", *cluster.addresses, *options)[1]
                assert said.endswith(f", since backup {number - 1}\n") == (number > 0), said

        monkeypatch.setattr(Checkpoints, "save", save_and_back_up)
        train(run_on(cluster, output, keep_checkpoints=1))
        monkeypatch.setattr(Checkpoints, "save", save)
        assert names[-1] not in client.describe().checkpoint_names
        before = client.describe().epoch
        with WeightClient(cluster.addresses, retry_seconds=5) as old_writer:
            old_writer.open_session("another", join=before)
            for shard in lost:
                cluster.processes[shard].kill()
                cluster.processes[shard].wait()
                data_dir = cluster.directory / f"shard-{shard}"
                shutil.rmtree(data_dir)
                if len(lost) == 1:  # only its data is gone, as `serve` would print_error
                    data_dir.mkdir()
                    (data_dir / "owner.lock").write_text("999999\n")
                options = ["--shard", shard, "--num-shards", 4]
                assert weightserver("restore", tmp_path / "backups/1", "--data-dir", data_dir, *options)[0] == 0
                cluster.restart(shard)
            rows = np.arange(5, 10)  # of shard 1
            with pytest.raises(DataLossError, match="lacks what it had acknowledged"):
                old_writer.push_gradients(rows, np.ones((len(rows), 16), np.float32), step=30)
        with WeightClient(cluster.addresses) as operator:
            assert {known.step for known in operator.checkpoints()} == {EVERY}, "complete on all shards"
            with pytest.raises(FencedError, match=r"open a (session first|new one)"):
                operator.open_session("another", join=before)
        assert weightserver("rollback", names[-1], *cluster.addresses, "--yes")[0] == 0
        with WeightClient(cluster.addresses) as operator:
            assert len({shard.epoch for shard in operator.describe().shards}) == 1
            assert operator.describe().epoch > before
        with pytest.raises(DataLossError, match="lacks what it had acknowledged"):
            train(run_on(cluster, output, resume=True))
        shutil.copy(tmp_path / f"files/{names[-1]}.safetensors", output / "checkpoints")
        assert_goes_on(cluster, output, undisturbed, resume_step=EVERY)


@pytest.mark.guard
def test_the_documented_backup_of_a_run_is_complete(
    undisturbed: tuple[list[float], RowState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer takes another checkpoint between the commands, and later removes the one that is backed up. Then
    everything except /backup is lost."""
    text = (Path(__file__).parents[3] / "docs/operations.md").read_text().partition("\n## Backups\n")[2]
    commands = list(itertools.takewhile(lambda line: line.startswith("    "), text.strip("\n").splitlines()))
    assert len(commands) == 4
    output, backed_up = tmp_path / "runs/a", tmp_path / "backup"
    with LocalCluster(2, tmp_path / "servers") as cluster, WeightClient(cluster.addresses) as client:
        places = {
            "127.0.0.1:50051 127.0.0.1:50052": " ".join(cluster.addresses),
            "/backup": str(backed_up),
            "runs/a": str(output),
            "weightserver ": f"{sys.executable} -m weightserver ",
        }
        pattern = re.compile("|".join(places))

        def do(*lines: str) -> None:
            script = "\n".join(pattern.sub(lambda found: places[found.group()], line) for line in lines)
            subprocess.run(["bash", "-ec", script], check=True, timeout=60)

        save = Checkpoints.save

        def save_and_copy(checkpoints: Checkpoints, step: int, *arguments: Any) -> None:
            save(checkpoints, step, *arguments)
            if step == EVERY:
                do(*commands[:2])
            if step == 2 * EVERY:
                do(*commands[2:])

        monkeypatch.setattr(Checkpoints, "save", save_and_copy)
        train(run_on(cluster, output, keep_checkpoints=2))
        assert f"step-{EVERY:012d}" not in [known.name for known in client.checkpoints()]
    monkeypatch.setattr(Checkpoints, "save", save)
    shutil.rmtree(output)
    for shard in range(2):
        restore(backed_up / "a", tmp_path / f"new/shard-{shard}", shard=shard)
    shutil.copytree(backed_up / "a-run", output)
    with LocalCluster(2, tmp_path / "new") as cluster, WeightClient(cluster.addresses) as client:
        train(run_on(cluster, output, resume=True))
        assert same(client.fetch_state(np.arange(NUM_IMAGES)), undisturbed[1])
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in records] == undisturbed[0][EVERY:]


@pytest.mark.guard
def test_a_run_resumes_on_other_shards(
    undisturbed: tuple[list[float], RowState], weightserver: Weightserver, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with LocalCluster(2, tmp_path / "old") as cluster:
        train(run_on(cluster, output))
        command = ["reshard", "--from", *cluster.addresses, "--rows-per-block", 8]
        for shard, target in enumerate(targets_in(tmp_path / "new", 3)):
            assert weightserver(*command, "--shard", f"{shard}/3", "--target", target)[0] == 0
    with LocalCluster(3, tmp_path / "new") as cluster:
        with pytest.raises(TableMismatchError, match="holds another table"):
            train(run_on(cluster, output, resume=True))
        assert_goes_on(cluster, output, undisturbed, rows_per_block=8)


@pytest.mark.guard
def test_shards_are_restarted_in_turn_while_a_run_trains(
    undisturbed: tuple[list[float], RowState], tmp_path: Path
) -> None:
    """Each shard drains after SIGTERM, and another process serves its directory."""
    output, restarts = tmp_path / "run", []
    with LocalCluster(2, tmp_path / "servers") as cluster:

        def restart_all() -> None:
            for number in range(2):
                metrics = output / "metrics.jsonl"
                while not metrics.exists() or metrics.read_text().count("\n") < 12 * number + 4:
                    time.sleep(0.002)
                ended = cluster.processes[number]
                cluster.restart(number)
                restarts.append((ended.returncode, len(metrics.read_text().splitlines())))

        operator = threading.Thread(target=restart_all)
        operator.start()
        last = len(undisturbed[0]) - 1
        train(run_on(cluster, output), on_step=lambda step: operator.join() if step == last else None)
        operator.join()
        with WeightClient(cluster.addresses) as client:
            state = client.fetch_state(np.arange(NUM_IMAGES))
    assert [code for code, _ in restarts] == [0, 0], "a shard did not end well"
    assert restarts[-1][1] < len(undisturbed[0]), "the run was over before"
    assert losses(output) == undisturbed[0]
    assert same(state, undisturbed[1])
