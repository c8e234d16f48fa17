"""Shards of the version before are replaced one after the other by this one's, under a client that works, and back."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.small_run import NUM_STEPS, ONLY_ROWS, losses, small_run
from tests.helpers.watching import wait_until
from trainer.loop import train
from weightserver import LocalCluster, WeightClient
from weightserver.common.version import FORMAT

ROOT = Path(__file__).parent.parent.parent
SINCE = "dc7e0b0b827b"
"""The first commit since which calls and records have this form; a release of this format takes its place."""
WRITER = """
import itertools, sys, threading, time
import numpy as np
from weightserver import TableSpec, WeightClient
is_over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
with WeightClient(sys.argv[1].split(",")) as client:
    client.create_table(TableSpec(num_rows=64, dim=4, rows_per_block=4, momentum=0, weight_decay=0, init_std=0))
    client.open_session("writer")
    for step in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count(client.describe().clock)):
        client.extend_schedule(step, np.ones(1, np.float32))
        client.push_gradients(np.arange(64), np.ones((64, 4), np.float32), step=step)
        print(step + 1, flush=True)
        time.sleep(0.01)
"""
"""Takes one from every row again and again, and prints how often the shards have acknowledged it."""


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


@pytest.fixture(scope="session")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weight server of the version before: the last release of this format but this commit, or that of `SINCE`."""
    try:
        is_shallow = git("rev-parse", "--is-shallow-repository").strip() == b"true"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git history to take the version before from")
    released = git("tag", "--list", f"v{FORMAT}.*", "--no-contains", "HEAD", "--sort=-version:refname").decode().split()
    commit = released[0] if released else SINCE
    try:
        packed = git("archive", commit, "weightserver")
    except subprocess.CalledProcessError:
        assert is_shallow, f"commit {commit} is missing"
        pytest.skip(f"this shallow clone lacks commit {commit}: git fetch --unshallow")
    directory = tmp_path_factory.mktemp("before")
    subprocess.run(["tar", "-x", "-C", str(directory)], input=packed, check=True)
    return directory


def program(tree: Path, *arguments: str) -> list[str]:
    """Python with the weight server of a tree."""
    return ["env", f"PYTHONPATH={tree}", sys.executable, "-P", *arguments]


class Updated(LocalCluster):
    """Its shards run the program of `tree` from their next start on."""

    tree: Path = ROOT

    @property
    def _program(self) -> list[str]:  # type: ignore[override]
        return program(self.tree, "-m", "weightserver")


@contextmanager
def writer(tree: Path, addresses: list[str], log: Path) -> Iterator[None]:
    """A client of a tree's version that writes, and logs it, until it is left."""
    command = program(tree, "-c", WRITER, ",".join(addresses))
    with log.open("a") as output, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output) as process:
        wait_for_writes(log)
        yield
        process.communicate(timeout=60)
    assert process.returncode == 0


def wait_for_writes(log: Path) -> None:
    before = log.read_text().count("\n")
    wait_until(lambda: log.read_text().count("\n") >= before + 5)


def retries() -> float:
    return sum(
        sample.value
        for family in WeightClient.metrics().collect()
        for sample in family.samples
        if sample.name == "weightserver_client_retries_total"
    )


@pytest.mark.guard
def test_shards_and_clients_of_two_versions_lose_nothing(tmp_path: Path, before: Path) -> None:
    """Shards roll over under a client of the version before, which is replaced last, and back under one of this."""
    Updated.tree, log = before, tmp_path / "acknowledged"
    with Updated(2, tmp_path) as cluster:
        for clients, shards in ((before, ROOT), (ROOT, before)):
            with writer(clients, cluster.addresses, log):
                Updated.tree = shards
                for shard in range(2):
                    cluster.restart(shard)
                    wait_for_writes(log)
        with WeightClient(cluster.addresses) as client:
            state = client.fetch_state(np.arange(64))
    acknowledged = int(log.read_text().split()[-1])
    assert set(state.last_step) == {acknowledged}
    assert (state.weight == -acknowledged).all()


@pytest.mark.guard
def test_shards_are_updated_and_put_back_unseen_by_the_trainer(
    tmp_path: Path, before: Path, one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each shard drains at SIGTERM, and the client retries while it is away: no step fails, no bit differs."""
    settings = {"encoder": ONLY_ROWS, "rows": "remote", "checkpoint_every": 13}
    train(small_run(tmp_path / "undisturbed", **settings))
    Updated.tree = before
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
