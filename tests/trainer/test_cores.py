"""Cores and memory that a process may use: real affinities, and a container's limits as files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cores import decode_threads
from weightserver.common.processes import usable_memory

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system knows no affinity")
def test_affinity() -> None:
    code = (
        "import os; from trainer.cores import usable_cores\n"
        "allowed = sorted(os.sched_getaffinity(0))\n"
        "os.sched_setaffinity(0, allowed[:1])\n"
        "print(usable_cores())"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "1\n"


def test_a_containers_memory(tmp_path: Path) -> None:
    machine = usable_memory(tmp_path)
    assert machine > 1 << 28
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_memory(tmp_path) == machine
    (tmp_path / "memory.max").write_text("1048576\n")
    assert usable_memory(tmp_path) == 1 << 20


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(12, "4", 3), (1, "8", 1), (96, "1", 16)])
def test_ranks_share_the_cores(cores: int, ranks: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("trainer.cores.usable_cores", lambda: cores)
    assert decode_threads() == threads
