"""An older copy of a shard's directory, during a run or between two: it ends with an error, or its rows are right."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.comparing import rows_in, same
from tests.helpers.small_run import EVERY, NUM_IMAGES, NUM_STEPS, ONLY_ROWS, PowerLoss, losses, small_run
from trainer.config import TrainConfig
from trainer.export.__main__ import main as export
from trainer.loop import train
from trainer.run.checkpoint_file import saved_steps
from weightserver import DataLossError, LocalCluster, RowState, WeightClient
from weightserver.operations.backup import backup
from weightserver.operations.restore import restore

ROWS = np.arange(NUM_IMAGES)
STOPPED_AT = 20
pytestmark = pytest.mark.usefixtures("one_thread")


def run(output: Path, **changes: Any) -> TrainConfig:
    return small_run(output, **{"encoder": ONLY_ROWS} | changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    train(run(output))
    return output


def rows_of(servers: Path) -> RowState:
    """All rows at the end of a run."""
    with LocalCluster(2, servers) as cluster, WeightClient(cluster.addresses) as client:
        return client.fetch_state(ROWS, step=NUM_STEPS)


def copy(cluster: LocalCluster, to: Path, *, put_back: Path | None = None) -> None:
    """Kills shard 1, copies its directory, puts another copy in its place if one is given, and restarts it."""
    directory = cluster.directory / "shard-1"
    cluster.processes[1].kill()
    cluster.processes[1].wait()
    shutil.copytree(directory, to, copy_function=shutil.copyfile)
    if put_back is not None:
        shutil.rmtree(directory)
        shutil.copytree(put_back, directory, copy_function=shutil.copyfile)
    cluster.restart(1)


@pytest.mark.guard
@pytest.mark.parametrize("rows", [pytest.param("remote", marks=pytest.mark.slow), "resident"])
def test_an_older_copy_under_a_run_ends_it(rows: str, tmp_path: Path, undisturbed: Path) -> None:
    """Otherwise it would continue with 37 pushes missing, and end normally with 245 of 300 wrong rows."""
    older, newest = tmp_path / "older", tmp_path / "newest"
    with LocalCluster(2, tmp_path / "servers") as cluster:

        def on_step(step: int) -> None:
            if step == 6:
                copy(cluster, older)
            if step == 22:
                copy(cluster, newest, put_back=older)

        config = run(tmp_path / "run", servers=",".join(cluster.addresses), rows=rows, retry_seconds=5.0)
        with pytest.raises(DataLossError, match=r"shard 1 at .* lacks what it had acknowledged: .* put the newest"):
            train(config, on_step=on_step)
        assert len(losses(config.run.output)) <= 2 * EVERY, "by the next checkpoint at the latest"
        files = config.run.output / "checkpoints"
        assert saved_steps(files)[-1] == EVERY, "of nothing that was lost"
        with pytest.raises(
            DataLossError, match=r"lacks what it had acknowledged: .*, or give --resume-step 0, the newest"
        ):
            train(config.with_settings(resume=True))
        copy(cluster, tmp_path / "ended", put_back=newest)
        train(config.with_settings(resume=True))
        assert losses(config.run.output) == losses(undisturbed)
    assert same(rows_of(tmp_path / "servers"), rows_of(undisturbed / "servers"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed at step 20, its `servers`; `copies` of shard 1 at steps 6 and 15, a `backup` of step 13."""
    root = tmp_path_factory.mktemp("stopped")
    with LocalCluster(2, root / "servers") as cluster:

        def on_step(step: int) -> None:
            if step in (6, 15):
                copy(cluster, root / "copies" / str(step))
            if step == 15:
                with WeightClient(cluster.addresses) as operator:
                    backup(operator, root / "backup")
            if step == STOPPED_AT:
                raise PowerLoss

        with pytest.raises(PowerLoss):
            train(run(root / "run", servers=",".join(cluster.addresses)), on_step=on_step)
    return root


def resumed(root: Path, servers: Path, **changes: Any) -> Path:
    """Resumes the stopped run, or a copy with `servers`, on the servers in that directory; returns its directory."""
    output = servers.parent / "run"
    if not output.exists():
        shutil.copytree(root / "run", output)
    with LocalCluster(2, servers) as cluster:
        train(run(output, servers=",".join(cluster.addresses), resume=True, **changes))
    return output


@pytest.mark.guard
def test_an_older_copy_between_two_runs_is_refused(
    stopped: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless its step is given; an export of rows refuses it too."""
    servers = shutil.copytree(stopped / "servers", tmp_path / "servers")
    shutil.rmtree(servers / "shard-1")
    shutil.copytree(stopped / "copies" / "6", servers / "shard-1")
    before = rows_in(sorted(servers.glob("shard-*/")))
    with pytest.raises(
        DataLossError, match=r"shard 1 .* lacks what it had acknowledged: .*, or give --resume-step 0, "
    ):
        resumed(stopped, servers)
    assert same(rows_in(sorted(servers.glob("shard-*/"))), before)
    with LocalCluster(2, servers) as cluster:
        rows = ["--output", str(tmp_path / "rows"), "--servers", ",".join(cluster.addresses)]
        with pytest.raises(SystemExit):
            export(["rows", str(tmp_path / "run"), *rows])
    assert re.search(r"lacks what it had acknowledged: .*, or give --checkpoint\n", capsys.readouterr().err)
    assert not (tmp_path / "rows").exists()
    output = resumed(stopped, servers, resume_step=0)
    assert losses(output) == losses(undisturbed)
    assert same(rows_of(servers), rows_of(undisturbed / "servers"))


@pytest.mark.guard
@pytest.mark.parametrize("shard", [1, 0], ids=["a later copy", "a backup of it"])
def test_servers_that_hold_the_checkpoint_are_accepted(
    shard: int, stopped: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Though one of them has lost later steps."""
    servers = shutil.copytree(stopped / "servers", tmp_path / "servers")
    shutil.rmtree(servers / f"shard-{shard}")
    if shard == 1:
        shutil.copytree(stopped / "copies" / "15", servers / "shard-1")
    else:
        restore(stopped / "backup", servers / "shard-0", shard=0)
    output = resumed(stopped, servers)
    assert losses(output) == losses(undisturbed)
    assert same(rows_of(servers), rows_of(undisturbed / "servers"))
