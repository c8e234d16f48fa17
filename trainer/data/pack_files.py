"""The files of a pack, in a directory or in a bucket: parts of them are read in any order, and ahead of their use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainer.data.cache import Cache, Piece
from trainer.data.config import SourceOptions
from weightserver.common.object_store import ObjectStoreError, Reason, find, is_remote

SEGMENT_BYTES = 1 << 21
"""Unit of what is fetched of a bucket's files and kept: large beside an image, small beside a machine's part of a
window."""
_ADVICE_BYTES = 1 << 17
"""Linux reads at most a device's read-ahead for one piece of advice."""
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
    """Files in a directory."""

    def read(self, file: File, offset: int, length: int) -> bytes:
        """A part of a file. Raises OSError if it cannot be read, ValueError if that ends the run."""
        content = _read(file.path, offset, length)
        if len(content) != length:
            raise OSError(f"{file.path} is cut off: pack the images again, into a new directory")
        return content

    def read_ahead(self, file: File, offset: int, length: int) -> float:
        """Begins to read a part that will be read; returns how much of what may be read ahead that is, 0 … 1."""
        with suppress(OSError):  # it is advice only, and some file systems refuse it
            descriptor = os.open(file.path, os.O_RDONLY)
            try:
                for start in range(offset, offset + length, _ADVICE_BYTES):
                    size = min(_ADVICE_BYTES, offset + length - start)
                    os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
        return length / _AHEAD_BYTES

    def whole(self, path: Path, sha256: str) -> Path:
        """A file on this machine with the content of `path`, which has this SHA-256."""
        return path


class CachedFiles:
    """Files in a bucket: whole segments of them are fetched into a cache on a disk."""

    def __init__(self, options: SourceOptions) -> None:
        self._cache = Cache(options.in_cache(), options.cache_bytes)

    def read(self, file: File, offset: int, length: int) -> bytes:
        stop = offset + length
        try:
            content = b"".join(
                self._part(piece, max(offset, piece.start), min(stop, piece.stop))
                for piece in _segments(file, offset, stop)
            )
        except OSError as error:  # of the disk, which says nothing about the image
            reason = f"--cache-dir {self._cache.directory} cannot be read ({error.strerror})"
            raise ValueError(f"{reason}: give another --cache-dir") from None
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

    def _part(self, piece: Piece, start: int, stop: int) -> bytes:
        """Bytes start … stop−1 of the file that a piece is of."""
        while True:
            with suppress(FileNotFoundError):  # it has left the cache since
                return _read(self._cache.fetched(piece), start - piece.start, stop - start)


def _segments(file: File, start: int, stop: int) -> Iterator[Piece]:
    """The segments that have bytes start … stop−1 of a file."""
    for first in range(start // SEGMENT_BYTES * SEGMENT_BYTES, min(stop, file.bytes), SEGMENT_BYTES):
        yield Piece(file.path, file.sha256, first, min(first + SEGMENT_BYTES, file.bytes))


def _read(path: Path, offset: int, length: int) -> bytes:
    """Bytes of a file from `offset` on, fewer at its end."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)
