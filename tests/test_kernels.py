"""The numeric tests in a process of their own, under other kernels than this machine would choose.

Which kernels a library takes depends on the processor: a tolerance found on one machine fails on another.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.helpers.kernels import AVX2_IN_TWO_THREADS, KERNELS, SCALAR, Kernel

QUICK = ["tests/test_arithmetic.py", "tests/trainer/test_loss.py", "tests/trainer/test_rows.py"]
NUMERIC = [
    *QUICK,
    "tests/trainer/test_model.py",
    "tests/trainer/data/test_augment.py",
    "tests/trainer/evaluate/test_protocols.py",
]
TRAINING = [
    "tests/trainer/test_distributed.py",
    "tests/trainer/test_encoder_export.py",
    "tests/trainer/test_options.py",
    "tests/trainer/test_resident.py",
    "tests/trainer/test_train.py",
    "tests/trainer/test_extend.py",
    "tests/trainer/data/test_ahead.py",
    "tests/trainer/data/test_packed.py",
    "tests/weightserver/test_correction.py",
    "tests/integration/test_exactness.py",
    "tests/integration/test_stores.py",
    "tests/integration/test_ranks.py",
]
"""Whole runs against one another."""

HAS = {"default": 0, "avx2": 1, "avx512": 2}
OWN = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}.get(torch.backends.cpu.get_cpu_capability(), -1)


def bear(kernel: Kernel, tests: list[str]) -> str:
    wanted = kernel.environment.get("ATEN_CPU_CAPABILITY", "default")
    if HAS[wanted] > OWN:
        pytest.skip(f"this machine has no {wanted}: ATen takes {torch.backends.cpu.get_cpu_capability()}")
    return kernel.run(tests)


@pytest.mark.parametrize(
    ("kernel", "other"),
    [(SCALAR, AVX2_IN_TWO_THREADS), (AVX2_IN_TWO_THREADS, SCALAR)],
    ids=["scalar", "AVX2, two threads"],
)
def test_quick_ones(kernel: Kernel, other: Kernel) -> None:
    report = bear(kernel, QUICK)
    assert not re.search(other.found, report), "the report tells kernels apart"


@pytest.mark.guard
@pytest.mark.parametrize("name", KERNELS)
def test_numeric_ones(name: str) -> None:
    bear(KERNELS[name], NUMERIC)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kernel", [SCALAR, AVX2_IN_TWO_THREADS], ids=["scalar", "AVX2, two threads"])
def test_training(kernel: Kernel) -> None:
    bear(kernel, TRAINING)
