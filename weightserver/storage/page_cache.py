"""Reads parts of a mapped file ahead of their use, and writes changed pages back early."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import resource
import threading
from collections.abc import Iterator

import numpy as np

_SYNC_FILE_RANGE_WRITE = 2
_WRITE_BACK_SECONDS = 0.004


def faults_from_disk() -> int:
    """Number of times that this thread used a page of a file that first had to be read from the disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def begin_reading(first: memoryview, last: memoryview) -> None:
    """Makes the system read a mapped file from one value to another while the caller continues."""
    start = address(first) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(address(last) + len(last) - start), mmap.MADV_WILLNEED)


def address(value: memoryview) -> int:
    """Where a value lies in memory."""
    return int(np.frombuffer(value, np.uint8).ctypes.data)


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
    everything = ctypes.c_int64(0)
    return bool(_libc().sync_file_range(descriptor, everything, everything, _SYNC_FILE_RANGE_WRITE) == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
