"""Finds out which parts of a file are in memory, and reads others ahead of their use.

A page fault reads as much around its page as the disk's readahead says: for blocks anywhere in a file larger than
memory, up to a hundred times too much. Without readahead each page is read by itself, which takes as long.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROBE = bytearray(1)


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
