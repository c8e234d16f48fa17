"""Finds out which parts of a file are in memory, reads others ahead of their use, and writes changed ones back early.

A page fault reads as much around its page as the disk's readahead says: for blocks anywhere in a file larger than
memory, up to a hundred times too much. Without readahead each page is read by itself, which takes as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_PROBE = bytearray(1)
_SYNC_FILE_RANGE_WRITE = 2
_WRITE_BACK_SECONDS = 0.004


def open_scattered(path: Path) -> int:
    """A descriptor to read with, for which the system reads no more than requested."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def is_cached(descriptor: int, offset: int) -> bool:
    """Whether a page is in memory; also True if the file system cannot tell."""
    try:
        os.preadv(descriptor, [_PROBE], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # EOPNOTSUPP
        return True
    return True


def begin_reading(descriptor: int, offset: int, num_bytes: int) -> None:
    """Makes the system read these bytes while the caller continues."""
    os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)


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
