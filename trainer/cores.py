"""Cores that a process may use, by its affinity and its container's quota."""

from __future__ import annotations

import os

_MAX_DECODE_THREADS = 16


def usable_cores() -> int:
    """Cores that this process may use, at least 1: by its affinity and its cgroup's quota."""
    from joblib import cpu_count

    return int(cpu_count())


def decode_threads() -> int:
    """Number of threads that decode images: this rank's share of the cores, at least 1 and at most 16.

    torchrun sets the number of ranks on the machine, LOCAL_WORLD_SIZE.
    """
    return min(_MAX_DECODE_THREADS, max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
