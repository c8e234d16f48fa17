"""Cores and memory that a process may use, by its affinity and its container's limits."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MAX_DECODE_THREADS = 16
_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files of cgroup versions 2 and 1; a container sees its own where the machine has those of all processes."""


def usable_cores() -> int:
    """Cores that this process may use, at least 1: by its affinity and its cgroup's quota."""
    from joblib import cpu_count

    return int(cpu_count())


def usable_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use: those of the machine, or its container's limit if that is less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no such version, or "max"
            sizes.append(int((cgroups / name).read_text()))
    return min(sizes)


def decode_threads() -> int:
    """Number of threads that decode images: this rank's share of the cores, at least 1 and at most 16.

    torchrun sets the number of ranks on the machine, LOCAL_WORLD_SIZE.
    """
    return min(_MAX_DECODE_THREADS, max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
