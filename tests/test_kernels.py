"""The numeric tests in a process of their own, under other kernels than this machine would choose.

Which kernels a library takes depends on the processor: a tolerance found on one machine fails on another.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.kernels import AVX2_IN_TWO_THREADS, MIXED, SCALAR, Kernels

QUICK = ["tests/test_arithmetic.py", "tests/weightserver/torch/test_loss.py"]
NUMERIC = [
    *QUICK,
    "tests/weightserver/torch/test_margins.py",
    "tests/trainer/test_model.py",
    "tests/trainer/data/test_augment.py",
    "tests/trainer/evaluate/test_protocols.py",
]
TRAINING = [
    "tests/trainer/test_distributed.py",
    "tests/trainer/test_encoders.py",
    "tests/weightserver/torch/test_margins.py",
    "tests/trainer/test_options.py",
    "tests/trainer/test_resident.py",
    "tests/trainer/test_train.py",
    "tests/trainer/test_extend.py",
    "tests/trainer/data/test_prefetch.py",
    "tests/trainer/data/test_packed.py",
    "tests/weightserver/test_correction.py",
    "tests/integration/test_exactness.py",
    "tests/integration/test_stores.py",
    "tests/integration/test_ranks.py",
]
"""Whole runs against one another."""

GUARD = "AVX2, MKL SSE4.2, two threads"
HAS = {"default": 0, "avx2": 1, "avx512": 2}
OWN = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}.get(torch.backends.cpu.get_cpu_capability(), -1)


def run_with(kernels: Kernels, tests: list[str], *, guards: bool = False) -> str:
    wanted = kernels.environment.get("ATEN_CPU_CAPABILITY", "default")
    if HAS[wanted] > OWN:
        pytest.skip(f"this machine has no {wanted}: ATen takes {torch.backends.cpu.get_cpu_capability()}")
    return kernels.run(tests, guards=guards)


@pytest.mark.guard
def test_quick_ones() -> None:
    report = run_with(SCALAR, QUICK)
    assert not AVX2_IN_TWO_THREADS.taken(report), "the report distinguishes kernels"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(kernels, id=name, marks=pytest.mark.guard if name == GUARD else pytest.mark.slow)
        for name, kernels in MIXED.items()
    ],
)
def test_numeric_ones(kernels: Kernels) -> None:
    run_with(kernels, NUMERIC)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kernels", [SCALAR, AVX2_IN_TWO_THREADS], ids=["scalar", "AVX2, two threads"])
def test_training(kernels: Kernels) -> None:
    run_with(kernels, TRAINING, guards=True)
