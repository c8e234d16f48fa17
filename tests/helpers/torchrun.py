"""Starts ranks on this machine as users do, by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(
    *arguments: object, num_ranks: int = 2, check: bool = True, seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs a module with arguments, `-m NAME ...`, on several ranks of a thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0 or not check, done.stderr[-4000:]
    return done
