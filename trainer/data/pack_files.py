"""The files of a pack, in a directory or in a bucket: parts of them are read in any order, and ahead of their use."""

from __future__ import annotations

import functools
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.data.cache import Cache, Piece
from trainer.data.config import SourceOptions
from weightserver.common.object_store import ObjectStoreError, Reason, find, is_remote

SEGMENT_BYTES = 1 << 21
"""Unit of what is fetched of a bucket's files and kept: large beside an image, small beside a machine's part of a
window."""
_DISK_SEGMENT_BYTES = 1 << 23
"""Unit of reading ahead from a disk."""
_OPEN_FILES = 256
_OPEN_PIECES = 128
"""Pieces that stay open: if they leave the cache, they take space beyond its limit until they are closed."""
_ADVICE_BYTES = 1 << 17
"""Linux reads at most a device's read-ahead for one piece of advice."""
_REMEMBERED_SEGMENTS = 1 << 11
_AHEAD_BYTES = 1 << 30
"""Most that is read ahead of its use from a disk."""


class File(NamedTuple):
    """A file of a pack whose content never changes."""

    path: Path
    bytes: int
    sha256: str
    """Identifies its content."""


def pack_files(directory: Path, options: SourceOptions) -> LocalFiles | CachedFiles:
    """The files of a pack; both kinds are thread-safe. Raises ValueError for one in a bucket without --cache-dir."""
    return CachedFiles(options) if is_remote(directory) else LocalFiles()


class LocalFiles:
    """Files in a directory. At most an eighth of the files that the process may open are open.

    A segment is read ahead on the second visit to it; visits in random order rarely come to one twice.
    """

    def __init__(self) -> None:
        self._open = functools.lru_cache(_share_of_files(8, _OPEN_FILES))(_Descriptor)
        self._segments: OrderedDict[tuple[Path, int], bool] = OrderedDict()  # whether it was read ahead
        self._lock = threading.Lock()

    def read(self, file: File, offset: int, length: int) -> bytes:
        """A part of a file. Raises OSError if it cannot be read, ValueError if that ends the run."""
        content = self._open(file.path).read(offset, length)
        if len(content) != length:
            raise OSError(f"{file.path} is cut off: pack the images again, into a new directory")
        return content

    def read_ahead(self, file: File, offset: int, length: int) -> float:
        """Begins to read the segments of a part that will be read; returns how much of what may be read ahead that is,
        0 … 1."""
        first, last = (place // _DISK_SEGMENT_BYTES for place in (offset, offset + length - 1))
        return sum(self._advised(file.path, number * _DISK_SEGMENT_BYTES) for number in range(first, last + 1))

    def _advised(self, path: Path, start: int) -> float:
        with self._lock:
            was_read_ahead = self._segments.get((path, start))
            self._segments[path, start] = was_read_ahead is not None
            if len(self._segments) > _REMEMBERED_SEGMENTS:
                self._segments.popitem(last=False)
        if was_read_ahead is not False or not hasattr(os, "posix_fadvise"):
            return 0.0
        opened = self._open(path)
        try:
            for place in range(start, start + _DISK_SEGMENT_BYTES, _ADVICE_BYTES):
                os.posix_fadvise(opened.number, place, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:  # it is advice only, and some file systems refuse it
            return 0.0
        return _DISK_SEGMENT_BYTES / _AHEAD_BYTES

    def whole(self, path: Path, sha256: str) -> Path:
        """A file on this machine with the content of `path`, which has this SHA-256."""
        return path


class CachedFiles:
    """Files in a bucket: whole segments of them are fetched into a cache on a disk."""

    def __init__(self, options: SourceOptions) -> None:
        self._cache = Cache.of(options)
        self._open = functools.lru_cache(_share_of_files(8, _OPEN_PIECES))(self._opened)

    def read(self, file: File, offset: int, length: int) -> bytes:
        stop = offset + length
        try:
            parts = [
                self._open(piece).read(max(0, offset - piece.start), min(stop, piece.stop) - max(offset, piece.start))
                for piece in _segments(file, offset, stop)
            ]
        except OSError as error:  # of the disk, which says nothing about the image
            reason = f"--cache-dir {self._cache.directory} cannot be read ({error.strerror})"
            raise ValueError(f"{reason}: give another --cache-dir") from None
        content = b"".join(parts) if len(parts) != 1 else parts[0]
        if len(content) != length:
            raise ObjectStoreError(file.path, Reason.CUT_OFF)
        return content

    def read_ahead(self, file: File, offset: int, length: int) -> float:
        return sum(map(self._cache.fetch_ahead, _segments(file, offset, offset + length)))

    def whole(self, path: Path, sha256: str) -> Path:
        found = find(path)
        if found is None:
            raise ObjectStoreError(path, Reason.MISSING)
        return self._cache.fetched(Piece(path, sha256, 0, found.bytes))

    def _opened(self, piece: Piece) -> _Descriptor:
        while True:
            try:
                return _Descriptor(self._cache.fetched(piece))
            except FileNotFoundError:
                pass  # it has left the cache since


def _segments(file: File, start: int, stop: int) -> Iterator[Piece]:
    """The segments that have bytes start … stop−1 of a file."""
    for first in range(start // SEGMENT_BYTES * SEGMENT_BYTES, min(stop, file.bytes), SEGMENT_BYTES):
        yield Piece(file.path, file.sha256, first, min(first + SEGMENT_BYTES, file.bytes))


def _share_of_files(divisor: int, most: int) -> int:
    """Number of files of one kind to keep open: the process's limit over `divisor`, at least 1 and at most `most`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // divisor))


class _Descriptor:
    """A file that stays open for reading as long as this object exists."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from `offset` on, fewer at the end; it stays open meanwhile."""
        return os.pread(self.number, length, offset)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
