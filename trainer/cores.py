"""Cores and memory that a process may use, by its affinity and its cgroups' quotas."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_MAX_DECODE_THREADS = 16


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, at least 1; a quota of one and a half counts as one.

    `root` contains proc/self/cgroup and sys/fs/cgroup.
    """
    if hasattr(os, "sched_getaffinity"):
        cores: float = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, math.floor(min([cores, *_quotas(root)])))


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: those of the machine, or the limit of a cgroup if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_memory_limits(root)])


def decode_threads(root: Path = Path("/")) -> int:
    """Number of threads that decode images: this rank's share of the cores, at least 1 and at most 16.

    torchrun sets the number of ranks on the machine, LOCAL_WORLD_SIZE.
    """
    return min(_MAX_DECODE_THREADS, max(1, usable_cores(root) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _cgroups(root: Path) -> Iterator[tuple[str, str]]:
    """Controllers and path of each cgroup that contains this process; those of version 2 name no controllers."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        yield controllers, path


def _memory_limits(root: Path) -> Iterator[int]:
    """Limit in bytes of each cgroup, version 2 or 1, that contains this process; unlimited ones are omitted."""
    mount = root / "sys/fs/cgroup"
    for controllers, path in _cgroups(root):
        if not controllers:
            limits = [_numbers(folder / "memory.max") for folder in _around(mount, path)]
        elif "memory" in controllers.split(","):
            limits = [_numbers(folder / "memory.limit_in_bytes") for folder in _around(mount / "memory", path)]
        else:
            continue
        yield from (int(limit[0]) for limit in limits if limit and limit[0] != "max")


def _quotas(root: Path) -> Iterator[float]:
    """Quota in cores of each cgroup, version 2 or 1, that contains this process; unlimited ones are omitted."""
    mount = root / "sys/fs/cgroup"
    for controllers, path in _cgroups(root):
        if not controllers:
            for folder in _around(mount, path):
                yield from _quota(_numbers(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for folder in _around(mount / "cpu", path):
                yield from _quota(_numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us"))


def _around(mount: Path, path: str) -> list[Path]:
    """Folders of a cgroup and of those that contain it; a container sees its own as the mount itself."""
    parts = Path(path).parts[1:]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _numbers(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _quota(numbers: list[str]) -> Iterator[float]:
    """The quota in cores, from quota and period in microseconds; 'max' and −1 mean no limit."""
    if len(numbers) == 2 and numbers[0] not in ("max", "-1"):
        yield int(numbers[0]) / int(numbers[1])
