"""Shards are replaced one after the other while a trainer works: it sees nothing, and computes the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.small_run import NUM_STEPS, ONLY_ROWS, losses, small_run
from trainer.loop import train
from weightserver import LocalCluster, WeightClient
from weightserver.common.version import FORMAT

ROOT = Path(__file__).parent.parent.parent
VERSION_FILE = "weightserver/common/version.py"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def previous_tree(directory: Path) -> Path:
    """The weight server of the version before, if it has this one's format, else of the last commit."""
    try:
        git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git history to take the version before from")
    changed = git("log", "-1", "--format=%H", "-G", '^__version__ = "', "--", VERSION_FILE).strip()
    before = f"{changed}^"
    commit = before if f'FORMAT = "{FORMAT}"' in git_show(before) else "HEAD"
    packed = subprocess.run(["git", "archive", commit, "weightserver"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(directory)], input=packed.stdout, check=True)
    return directory


def git_show(commit: str) -> str:
    try:
        return git("show", f"{commit}:{VERSION_FILE}")
    except subprocess.CalledProcessError:
        return ""  # this version is the first, or the history does not reach further


class Updated(LocalCluster):
    """Its shards run the program of `tree` from their next start on."""

    tree: Path = ROOT

    @property
    def _program(self) -> list[str]:  # type: ignore[override]
        return ["env", f"PYTHONPATH={self.tree}", sys.executable, "-P", "-m", "weightserver"]


def retries() -> float:
    return sum(
        sample.value
        for family in WeightClient.metrics().collect()
        for sample in family.samples
        if sample.name == "weightserver_client_retries_total"
    )


@pytest.mark.guard
def test_shards_are_updated_and_put_back_unseen_by_the_trainer(
    tmp_path: Path, one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each shard drains at SIGTERM, and the client retries while it is away: no step fails, no bit differs."""
    before = tmp_path / "before"
    before.mkdir()
    settings = {"encoder": ONLY_ROWS, "rows": "remote", "checkpoint_every": 13}
    train(small_run(tmp_path / "undisturbed", **settings))
    Updated.tree = previous_tree(before)
    with Updated(2, tmp_path / "servers") as cluster:
        others = [process.pid for process in cluster.processes]
        restarting: list[threading.Thread] = []

        def update(step: int) -> None:
            if step and step % 8 == 0:  # shard 0 and 1 to this version, then back
                number = step // 8 - 1
                Updated.tree = ROOT if number < 2 else before
                for thread in restarting:
                    thread.join()
                restarting.append(threading.Thread(target=cluster.restart, args=(number % 2,)))
                restarting[-1].start()

        seen = retries()
        config = small_run(tmp_path / "run", servers=",".join(cluster.addresses), **settings)
        train(config, on_step=update)
        for thread in restarting:
            thread.join()
        assert len(restarting) == (NUM_STEPS - 1) // 8
        assert retries() > seen, "the trainer's client met shards that were away"
        assert not {process.pid for process in cluster.processes} & set(others)
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    for shard in range(2):
        log = (tmp_path / f"servers/shard-{shard}.log").read_text()
        assert len(re.findall(r"draining", log)) == len(re.findall(r"closed", log)) == 3, log
