"""Cores that a process may use: real affinities, and cgroups as files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cores import decode_threads, usable_cores

ROOT = Path(__file__).parents[2]


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system knows no affinity")
def test_affinity(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from trainer.cores import usable_cores\n"
        "allowed = sorted(os.sched_getaffinity(0))\n"
        "for count in (1, len(allowed)):\n"
        "    os.sched_setaffinity(0, allowed[:count])\n"
        "    print(usable_cores(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.split() == ["1", str(len(os.sched_getaffinity(0)))]


@pytest.mark.parametrize(
    ("contents", "cores"),
    [
        ({}, 12),
        ({"proc/self/cgroup": "0::/\n"}, 12),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 12),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "10000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "100000 50000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/../host\n", "sys/fs/cgroup/cpu.max": "500000 100000\n"}, 5),  # in a container
        (
            {
                "proc/self/cgroup": "2:memory:/m\n1:cpu,cpuacct:/a\n0::/\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "600000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/m/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/m/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
    ],
)
def test_quotas(contents: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert usable_cores(files(tmp_path, contents)) == cores


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(12, 1, 12), (12, 8, 1), (12, 5, 2), (4, 8, 1), (64, 2, 16)])
def test_ranks_share_the_cores(
    cores: int, ranks: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert decode_threads(tmp_path) == threads
