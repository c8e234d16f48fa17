"""The trainer on one and two pretended GPUs against the CPU: the same losses, devices with an index, few waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import pretended_gpu
from tests.helpers.bars import write_bars
from tests.helpers.gpu_runs import LOG_EVERY, NUM_IMAGES, NUM_STEPS, SCENARIOS
from tests.helpers.image_tree import plain_tree
from tests.helpers.ports import reserved_ports
from tests.helpers.torchrun import torchrun
from weightserver import LocalCluster

pytestmark = [
    pytest.mark.guard,
    pytest.mark.timeout(600),
    pytest.mark.skipif(pretended_gpu.unavailable() is not None, reason=str(pretended_gpu.unavailable())),
]


@pytest.mark.parametrize("num_gpus", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gpus_train_like_the_cpu(
    num_gpus: int, cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test for everything, because the runs take the time."""
    (tmp_path / "idx").mkdir()
    write_bars(tmp_path / "idx", num_train=NUM_IMAGES, num_test=10)
    plain_tree(tmp_path / "folder", NUM_IMAGES)
    pretended_gpu.compile_library()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # each run has a port of its own
    with reserved_ports(4 * len(SCENARIOS)) as ports:
        arguments = [tmp_path, ",".join(cluster.addresses), tmp_path, ",".join(map(str, ports)), ";".join(SCENARIOS)]
        torchrun("tests.helpers.gpu_runs", *arguments, num_ranks=num_gpus, seconds=500)
    recorded = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_gpus)]
    for scenario, settings in SCENARIOS.items():
        losses = recorded[0][scenario]
        assert len(losses["cuda"]) == NUM_STEPS // LOG_EVERY
        # bit for bit on one GPU; two GPUs pad their rows, which changes the order of sums
        rounding = 1e-3 if settings.get("precision") == "bfloat16" else 1e-6
        tolerance = 0.0 if len(recorded) == 1 else rounding
        np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=tolerance, err_msg=scenario)
        for rank, record in enumerate(records[scenario] for records in recorded):
            waits = {step: record["waits"][step] for step in steady(scenario)}
            assert not any(waits.values()), (scenario, waits)  # of all row stores only their threads wait for servers
            assert record["shapes"][2] == record["shapes"][3] == record["shapes"][NUM_STEPS - 1], scenario
            assert record["memory_asked"] == record["used"] == [rank], "each rank uses its own GPU alone"
            assert record["num_seeds"] == NUM_STEPS, "one a step"
    if num_gpus == 1:
        for scenario in ("in memory, resident", "decoded, resident"):
            copies = recorded[0][scenario]["copies"]
            assert any("GPU to host" in what and "resident.py" in what for what in copies), copies


def steady(scenario: str) -> list[int]:
    """Steps without a record or a checkpoint, after the first two."""
    every = (LOG_EVERY, SCENARIOS[scenario].get("checkpoint_every", LOG_EVERY))
    return [step for step in range(2, NUM_STEPS) if all(step % number for number in every)]


CHECKS = {
    "another device": "torch.ones(2, device='cuda:0') + torch.ones(2, device='cuda:1')",
    "a GPU without an index": "torch.ones(2, device='cuda')",
    "the host's memory": "torch.ones(2, device='cuda:0') + torch.ones(2)",
    "indices elsewhere": "torch.ones(2, device='cuda:0')[torch.zeros(2, dtype=torch.int64, device='cuda:1')]",
    "momentum of other strides": "fused_sgd()",
    "no deterministic backward": "pooled()",
    "memory that changes while it is copied": "overwritten()",
    "a result before it is there": "early()",
}
CHECKED = """
import os
import sys
from tests.helpers.pretended_gpu import load, pretended_gpus
load()
import torch

def fused_sgd():
    weight = torch.nn.Parameter(torch.ones(4, 3, 2, 2, device="cuda:0").to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.state[weight]["momentum_buffer"] = torch.ones(4, 3, 2, 2, device="cuda:0")
    optimizer.step()

def pooled():
    torch.use_deterministic_algorithms(True)
    maps = torch.ones(1, 1, 4, 4, device="cuda:0", requires_grad=True)
    torch.nn.functional.adaptive_avg_pool2d(maps, 3).sum().backward()

def overwritten():
    memory = torch.ones(3).pin_memory()
    memory.to("cuda:0", non_blocking=True)
    memory += 1
    torch.cuda.synchronize()

def early():
    memory = torch.empty(3, pin_memory=True)
    memory.copy_(torch.ones(3, device="cuda:0"), non_blocking=True)
    if memory.isnan().all():
        torch.cuda.synchronize()
        assert memory.eq(1).all()
        raise RuntimeError("it was not there")

for check in sys.argv[1:]:
    with pretended_gpus(2):
        try:
            exec(check)
        except RuntimeError as error:
            print(str(error).splitlines()[0][:100])
        else:
            raise AssertionError(f"not refused: {check}")
sys.stdout.flush()
os._exit(0)  # autograd's thread may still drop the refused backward's error, which the interpreter's end would abort
"""


def test_the_pretended_gpu_refuses_what_cuda_refuses() -> None:
    ran = subprocess.run([sys.executable, "-c", CHECKED, *CHECKS.values()], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == len(CHECKS)
