"""The trainer on one and two pretended GPUs against the CPU: the same losses, devices with an index, few waits."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import pretended_gpu
from tests.helpers.gpu_runs import LOG_EVERY, NUM_STEPS, SCENARIOS
from tests.helpers.image_tree import plain_tree
from weightserver import LocalCluster

pytestmark = [
    pytest.mark.guard,
    pytest.mark.skipif(pretended_gpu.unavailable() is not None, reason=str(pretended_gpu.unavailable())),
]
NUM_IMAGES = 64
RankRecords = list[dict[str, Any]]


def grey_images(directory: Path) -> None:
    """Files as MNIST's, with noise."""
    generator = np.random.default_rng(0)
    directory.mkdir()
    for name, number in (("train", NUM_IMAGES), ("t10k", 10)):
        labels = generator.integers(0, 4, number).astype(np.uint8)
        images = generator.integers(0, 256, (number, 28, 28)).astype(np.uint8)
        for kind, magic, data in (("images-idx3", 0x803, images), ("labels-idx1", 0x801, labels)):
            header = np.array([magic, *data.shape], ">i4").tobytes()
            (directory / f"{name}-{kind}-ubyte").write_bytes(header + data.tobytes())


def free_ports(number: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_ranks(num_ranks: int, out: Path, servers: str, images: Path, scenarios: list[str]) -> RankRecords:
    """What each rank recorded of the scenarios."""
    pretended_gpu.compile_library()
    ports = ",".join(free_ports(2 * len(scenarios)))
    arguments = [str(out), servers, str(images), ports, ";".join(scenarios)]
    common = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.gpu_runs", *arguments],
            env=os.environ
            | {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            stdout=None,
            stderr=None,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-5000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module", params=[1, 2], ids="{} GPUs".format)
def recorded(
    request: pytest.FixtureRequest, cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> RankRecords:
    out = tmp_path_factory.mktemp("gpus")
    grey_images(out / "idx")
    plain_tree(out / "folder", NUM_IMAGES)
    return run_ranks(request.param, out, ",".join(cluster.addresses), out, list(SCENARIOS))


def test_losses_are_those_of_the_cpu(recorded: RankRecords) -> None:
    for scenario in SCENARIOS:
        losses = recorded[0][scenario]
        assert len(losses["cuda"]) == NUM_STEPS // LOG_EVERY
        assert losses["cuda"] == losses["cpu"], scenario
