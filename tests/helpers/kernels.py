"""Runs test files in a process whose libraries take other kernels than this machine's own, and says which they took.

As a pytest plugin (-p tests.helpers.kernels) this file reports, when a session starts, what the libraries have chosen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_WITHOUT_AVX2 = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"
_WITHOUT_AVX512 = "X86_V4 AVX512_ICL AVX512_SPR"


@dataclass(frozen=True)
class Kernel:
    """Environment variables, and what must then be found in the report."""

    environment: dict[str, str]
    found: str
    """A regular expression."""

    def run(self, tests: list[str]) -> str:
        """The output of the quick ones among `tests` (files, or single tests), which must pass under this kernel."""
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.helpers.kernels", "-p", "no:cacheprovider"]
        environment = {"OMP_NUM_THREADS": "1"} | self.environment
        done = subprocess.run(
            [*command, *tests], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]
        assert re.search(self.found, done.stdout), f"{self.environment} had no effect:\n{done.stdout[:4_000]}"
        return done.stdout


def _aten(name: str) -> Kernel:
    return Kernel({"ATEN_CPU_CAPABILITY": name}, f"ATen: {name.upper()}\n")


KERNELS = {
    "ATen default": _aten("default"),
    "ATen AVX2": _aten("avx2"),
    "ATen AVX-512": _aten("avx512"),
    "oneDNN SSE4.1": Kernel({"ONEDNN_MAX_CPU_ISA": "SSE41"}, r"cpu,isa:Intel SSE4\.1\n"),
    "oneDNN AVX2": Kernel({"ONEDNN_MAX_CPU_ISA": "AVX2"}, r"cpu,isa:Intel AVX2\n"),
    "MKL compatible": Kernel({"MKL_CBWR": "COMPATIBLE"}, "SGEMM.* CNR:COMPATIBLE "),
    # Other makers' processors get MKL's own choice, whatever is asked for, and it does not say which.
    "MKL SSE4.2": Kernel(
        {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, r"oneMKL .*(SSE4\.2|Intel\(R\) Architecture processors)"
    ),
    "NumPy baseline": Kernel({"NPY_DISABLE_CPU_FEATURES": _WITHOUT_AVX2}, r"NumPy: \[\]\n"),
    "two threads": Kernel({"OMP_NUM_THREADS": "2"}, "threads: 2\n"),
}
"""One library at a time, all others as this machine has them."""

SCALAR = Kernel(
    {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "NPY_DISABLE_CPU_FEATURES": _WITHOUT_AVX2,
    },
    r"(?s)ATen: DEFAULT\n.*NumPy: \[\]\n",
)
"""As little as every library bears with."""

AVX2_IN_TWO_THREADS = Kernel(
    {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": _WITHOUT_AVX512,
        "OMP_NUM_THREADS": "2",
    },
    r"(?s)ATen: AVX2\n.*threads: 2\n",
)
"""A processor of the generation before."""


def pytest_sessionstart(session: pytest.Session) -> None:
    import torch
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    print(f"ATen: {torch.backends.cpu.get_cpu_capability()}")
    print(f"NumPy: {[name for name in __cpu_dispatch__ if __cpu_features__[name]]}")
    print(f"threads: {torch.get_num_threads()}", flush=True)
    mkl, onednn = torch.backends.mkl, torch.backends.mkldnn
    with mkl.verbose(mkl.VERBOSE_ON), onednn.verbose(onednn.VERBOSE_ON):  # which print by themselves
        torch.nn.functional.conv2d(torch.ones(2, 3, 16, 16), torch.ones(4, 3, 3, 3))
        torch.ones(64, 64) @ torch.ones(64, 64)
