"""Shards that die at points of a commit while a run trains, and are restarted as by a supervisor: nothing changes.

Kills at random times are in test_histories.py, a killed shard under a head in tests/head/test_breaks.py.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.failpoints import DEATHS, POINTS, DyingCluster
from tests.helpers.small_run import NUM_IMAGES, ONLY_ROWS, losses, small_run
from trainer.loop import train
from weightserver import LocalCluster, RowState, WeightClient

LONG = [pytest.mark.slow, pytest.mark.timeout(1_800)]


class Supervisor:
    """Lets shards die at points of commits that the seed chooses, and restarts them."""

    def __init__(self, cluster: DyingCluster, seed: int, num_deaths: int) -> None:
        self.deaths: Counter[str] = Counter()
        self._cluster = cluster
        self._random = random.Random(seed)
        self._points = [POINTS[number % len(POINTS)] for number in range(num_deaths)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for number, point in enumerate(self._points):
            shard = number % len(self._cluster.processes)
            self._cluster.arm(shard, point, self._random.randint(2, 6))
            self._cluster.restart(shard)
            process = self._cluster.processes[shard]
            while process.poll() is None:
                if self._stop.wait(0.005):
                    return
            assert process.returncode in DEATHS
            self.deaths[point] += 1
            self._cluster.restart(shard)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()


def outcome(cluster: LocalCluster, output: Path, rows: Any, steps: int) -> tuple[list[float], RowState]:
    """Returns every loss of a run without an encoder, and all rows on the servers."""
    servers = ",".join(cluster.addresses)
    train(small_run(output, servers=servers, rows=rows, steps=steps, checkpoint_every=23, encoder=ONLY_ROWS))
    with WeightClient(cluster.addresses) as client:
        return losses(output), client.fetch_state(np.arange(NUM_IMAGES))


@pytest.mark.parametrize(("steps", "num_deaths"), [(200, 4), pytest.param(6_000, 100, marks=LONG, id="long")])
@pytest.mark.guard
def test_shards_that_die_at_points_of_a_commit_lose_nothing(steps: int, num_deaths: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with LocalCluster(2, tmp_path / "undisturbed") as cluster:
        expected, state = outcome(cluster, tmp_path / "a", "resident", steps)
    with DyingCluster(2, tmp_path / "dying") as cluster, Supervisor(cluster, steps, num_deaths) as supervisor:
        killed_losses, killed_state = outcome(cluster, tmp_path / "b", "resident", steps)
    assert [supervisor.deaths[point] for point in POINTS] == [num_deaths // 4] * 4, "the run was over before"
    assert killed_losses == expected
    for name in vars(state):
        assert np.array_equal(getattr(killed_state, name), getattr(state, name)), name
