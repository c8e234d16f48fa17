"""If a rank fails or is killed, the others end within a minute, even if they ignore signals."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import pretended_gpu
from tests.helpers.failing_rank import FAILURE
from tests.helpers.gpus import Gpus

LIMIT_SECONDS = 60
FAILING_STEP = 5
SMALL = "--num-images 200 --batch-size 8 --num-negatives 32 --window-size 40 --window-stride 8 --dim 8 --no-evaluate"


@pytest.mark.parametrize(
    ("how", "device"),
    [
        pytest.param("raises", "cpu", marks=pytest.mark.guard),
        pytest.param("crashes", "cuda", marks=pytest.mark.slow),
        pytest.param("is killed while the others are deaf", "cuda", marks=pytest.mark.slow),
        pytest.param("raises", "cuda", marks=pytest.mark.gpu),
        pytest.param("crashes", "cuda", marks=pytest.mark.gpu),
        pytest.param("is killed", "cuda", marks=pytest.mark.gpu),  # NCCL itself makes the others deaf
    ],
)
def test_all_ranks_end_soon(how: str, device: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    failed_at, num_ranks = tmp_path / "failed-at", 2
    pretended = list[str]()
    if device == "cuda":
        gpus: Gpus = request.getfixturevalue("gpus")
        gpus.need(2)
        num_ranks, pretended = gpus.number, gpus.python[1:]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += pretended
    command += ["-m", "tests.helpers.failing_rank", how, str(FAILING_STEP), "synthetic", *SMALL.split()]
    command += ["--encoder.name", "none", "--device", device, "--output", str(tmp_path / "run")]
    environment = os.environ | {"FAILED_AT": str(failed_at), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not failed_at.exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.05)
        ranks = [one for one in psutil.Process(process.pid).children() if one.is_running()]
        errors = process.communicate(timeout=120)[1]
    seconds = time.time() - float(failed_at.read_text())
    assert seconds < LIMIT_SECONDS, errors
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in ranks)
    assert process.returncode != 0
    if "killed" not in how:
        assert FAILURE in errors


@pytest.mark.guard
def test_a_gpu_without_memory_is_one_line_that_says_what_to_lower(tmp_path: Path) -> None:
    if why := pretended_gpu.unavailable():
        pytest.skip(why)
    command = [*pretended_gpu.command(1), "-m", "trainer", "synthetic", *SMALL.split(), "--encoder.name", "none"]
    command += ["--device", "cuda", "--output", str(tmp_path / "run"), "--log-format", "json", "--rows", "dense"]
    environment = os.environ | {"PRETENDED_GPU_LARGEST_TENSOR_BYTES": "5000", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 1
    (line,) = [line for line in ran.stderr.splitlines() if "memory" in line]
    for part in ("--batch-size", "--accumulate", "--num-negatives", "--precision bfloat16", "resumed run keeps these"):
        assert part in line
    assert "Traceback" not in ran.stderr
