"""Tells reads of a mapped file that wait for the disk from others, and writes changed pages back early."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
import threading
from collections.abc import Callable, Iterator

_SYNC_FILE_RANGE_WRITE = 2
_WRITE_BACK_SECONDS = 0.004


def faults_from_disk() -> int:
    """Number of times that this thread used a page of a file that first had to be read from the disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


@contextlib.contextmanager
def writing_back(descriptor: int) -> Iterator[None]:
    """Within the context, the disk writes what any thread writes to the file, which otherwise begins when it is synced.

    Promises nothing about what is on disk. An error of the disk is still reported to the next sync through any other
    descriptor.
    """
    done = threading.Event()

    def write_back() -> None:
        while begin_writing_back(descriptor) and not done.wait(_WRITE_BACK_SECONDS):
            pass

    thread = threading.Thread(target=write_back, name="writeback", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads
        yield
        return
    try:
        yield
    finally:
        done.set()
        thread.join()


def begin_writing_back(descriptor: int) -> bool:
    """Makes the system write the file's changed pages while the caller continues; returns False if it cannot."""
    function = _sync_file_range()
    return function is not None and function(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE) == 0


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system's function; None if it has none."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    function.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
    found: Callable[[int, int, int, int], int] = function
    return found
