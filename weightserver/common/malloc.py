"""Keeps large buffers in the process; glibc would otherwise return each to the kernel and pay with page faults."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MMAP_BYTES = 32 << 20
"""The highest value that glibc accepts."""
_TRIM_BYTES = 1 << 30
_ARENAS = 2
"""Few arenas, so that threads reuse each other's memory; with one arena per thread each keeps its largest request."""


def keep_large_buffers() -> None:
    """Makes malloc reuse buffers of up to 32 MiB; call it once, early in a process. Does nothing without glibc.

    Measured: on both sides it more than halves the time of fetching 65,520 rows of 128.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)


def own_bytes() -> int:
    """The process's memory in bytes without mapped files; 0 if the system does not report it."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


def return_free_memory() -> None:
    """Returns memory that malloc keeps to the kernel. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
