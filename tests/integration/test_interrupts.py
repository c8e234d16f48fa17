"""Signals that interrupt a client's calls anywhere: in its own or gRPC's Python code, and while it waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.interrupted_calls import HORIZON, SPEC
from weightserver import LocalCluster, WeightClient

SECONDS = 10
ROOT = Path(__file__).parents[2]


@pytest.mark.guard
@pytest.mark.parametrize("num_shards", [1, 2])
def test_interrupts_do_not_affect_later_calls(tmp_path: Path, num_shards: int) -> None:
    """Pushes, fetches, checkpoints, opening and closing succeed when repeated; each push counts once."""
    with LocalCluster(num_shards, tmp_path) as cluster:
        with WeightClient(cluster.addresses) as client:
            client.create_table(SPEC)
            client.extend_schedule(0, np.ones(HORIZON, np.float32))
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.interrupted_calls", str(SECONDS), "0", *cluster.addresses],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=2 * SECONDS + 10,
            check=True,
        )
    assert int(done.stdout) > 100
