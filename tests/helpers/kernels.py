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
class Kernels:
    """Environment variables, and what must then be found in the report."""

    environment: dict[str, str]
    found: tuple[str, ...]
    """Regular expressions."""

    def __or__(self, other: Kernels) -> Kernels:
        return Kernels(self.environment | other.environment, self.found + other.found)

    def run(self, tests: list[str], *, guards: bool = False) -> str:
        """The output of the quick ones among `tests` (files, or single tests), with `guards` of those too, which must
        pass with these kernels."""
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.helpers.kernels", "-p", "no:cacheprovider"]
        if guards:
            command += ["-m", "not (slow or docker or gpu)"]
        environment = {"OMP_NUM_THREADS": "1"} | self.environment
        done = subprocess.run(
            [*command, *tests], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]
        assert self.taken(done.stdout), f"{self.environment} had no effect:\n{done.stdout[:4_000]}"
        return done.stdout

    def taken(self, report: str) -> bool:
        return all(re.search(expression, report) for expression in self.found)


def _aten(name: str) -> Kernels:
    return Kernels({"ATEN_CPU_CAPABILITY": name}, (f"ATen: {name.upper()}\n",))


def _numpy_without(features: str) -> Kernels:
    left = "".join(rf"(?!.*'{feature}')" for feature in features.split())
    return Kernels({"NPY_DISABLE_CPU_FEATURES": features}, (rf"NumPy: {left}\[",))


_ONEDNN_SSE = Kernels({"ONEDNN_MAX_CPU_ISA": "SSE41"}, (r"cpu,isa:Intel SSE4\.1\n",))
_ONEDNN_AVX2 = Kernels({"ONEDNN_MAX_CPU_ISA": "AVX2"}, (r"cpu,isa:Intel AVX2\n",))
_MKL_COMPATIBLE = Kernels({"MKL_CBWR": "COMPATIBLE"}, ("SGEMM.* CNR:COMPATIBLE ",))
# Other makers' processors get MKL's own choice, whatever is requested, and it does not say which.
_MKL_SSE = Kernels({"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, (r"oneMKL .*(SSE4\.2|Intel\(R\) Architecture processors)",))
_TWO_THREADS = Kernels({"OMP_NUM_THREADS": "2"}, ("threads: 2\n",))

SCALAR = _aten("default") | _ONEDNN_SSE | _MKL_COMPATIBLE | _numpy_without(_WITHOUT_AVX2)
"""The smallest instruction set that every library supports."""
AVX2_IN_TWO_THREADS = _aten("avx2") | _ONEDNN_AVX2 | _numpy_without(_WITHOUT_AVX512) | _TWO_THREADS
"""A processor of the previous generation."""
MIXED = {
    "ATen default, two threads": _aten("default") | _TWO_THREADS,
    "ATen AVX2, MKL compatible": _aten("avx2") | _MKL_COMPATIBLE,
    "ATen AVX-512, oneDNN SSE4.1, NumPy's least": _aten("avx512") | _ONEDNN_SSE | _numpy_without(_WITHOUT_AVX2),
    "AVX2, MKL SSE4.2, two threads": AVX2_IN_TWO_THREADS | _MKL_SSE,
}
"""Some libraries' kernels, the others' as this machine has them."""


def pytest_sessionstart(session: pytest.Session) -> None:
    import torch
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__  # type: ignore[import-not-found]

    print(f"ATen: {torch.backends.cpu.get_cpu_capability()}")
    print(f"NumPy: {[name for name in __cpu_dispatch__ if __cpu_features__[name]]}")
    print(f"threads: {torch.get_num_threads()}", flush=True)
    mkl, onednn = torch.backends.mkl, torch.backends.mkldnn
    with mkl.verbose(mkl.VERBOSE_ON), onednn.verbose(onednn.VERBOSE_ON):  # which print by themselves
        torch.nn.functional.conv2d(torch.ones(2, 3, 16, 16), torch.ones(4, 3, 3, 3))
        torch.ones(64, 64) @ torch.ones(64, 64)
