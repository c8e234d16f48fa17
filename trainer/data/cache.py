"""A cache of pieces of objects on a disk, which processes share; those used longest ago leave first."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, NamedTuple

from weightserver.common.atomic_files import lock_file, locked
from weightserver.common.object_store import ObjectStoreError, Reason, copy_range

_THREADS = 16
_LOCKS = 256
_KEPT = 15 / 16
"""Share of the limit that stays when pieces leave."""
_ROOM_SECONDS = 150.0
"""How long pieces that are being fetched may take the room: longer than a request is repeated."""
_POLL_SECONDS = 0.05
_TOUCHED_SECONDS = 60.0
"""How often a piece in use is marked as used."""
_REMEMBERED = 1 << 16


class Piece(NamedTuple):
    """Bytes start … stop−1 of an object."""

    source: Path
    version: str
    """Identifies the object's content."""
    start: int
    stop: int

    @property
    def name(self) -> str:
        return hashlib.sha256(repr((self.version, self.start, self.stop)).encode()).hexdigest()


class Cache:
    """Thread-safe. One thread of all processes fetches a piece; space is reserved on the disk before that, so that the
    cache never exceeds its limit.

    Args:
        directory: created if it is missing.
        limit: bytes.

    Raises:
        ValueError: the directory cannot be written.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self._pieces, self._locks = directory / "pieces", directory / "locks"
        self._seen: dict[Piece, float] = {}
        self._versions: dict[Path, str] = {}
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        with writing(self.directory):
            self._pieces.mkdir(parents=True, exist_ok=True)
            self._locks.mkdir(exist_ok=True)
            with locked(self._locks / "size") as descriptor:
                os.ftruncate(descriptor, 0)  # counted anew
        weakref.finalize(self, _end, self._queue)

    def fetched(self, piece: Piece) -> Path:
        """A file with the bytes of a piece, which is fetched unless it is there. The file may be removed at any time.

        Raises:
            ValueError: it cannot be fetched or written.
        """
        path = self._pieces / piece.name
        with writing(self.directory):
            try:
                os.utime(path)
            except FileNotFoundError:
                with locked(self._locks / str(int(piece.name[:8], 16) % _LOCKS)):
                    if not path.exists():
                        self._fetch(piece, path)
        return path

    def fetch_ahead(self, piece: Piece) -> float:
        """Begins to fetch a piece unless it is there or begun; returns its share of a quarter of the limit, or 0."""
        now = time.monotonic()
        if now - self._seen.get(piece, -_TOUCHED_SECONDS) < _TOUCHED_SECONDS:
            return 0.0
        self._seen[piece] = now
        if len(self._seen) > _REMEMBERED:
            with suppress(KeyError, StopIteration, RuntimeError):
                del self._seen[next(iter(self._seen))]
        try:
            os.utime(self._pieces / piece.name)
        except FileNotFoundError:
            self._start()
            self._queue.put(lambda: self.fetched(piece))
            return (piece.stop - piece.start) / (self.limit / 4)
        return 0.0

    def _start(self) -> None:
        with self._starting:
            while len(self._threads) < _THREADS:
                # daemons: what is still queued at the end of the process is not waited for
                thread = threading.Thread(target=_work, args=(self._queue,), daemon=True, name="fetching ahead")
                self._threads.append(thread)
                thread.start()

    def _fetch(self, piece: Piece, path: Path) -> None:
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            with self._reserve(partial, piece.stop - piece.start) as file:
                version = copy_range(piece.source, piece.start, piece.stop, file, sha256=piece.version)
                if self._versions.setdefault(piece.source, version) != version:
                    raise ObjectStoreError(piece.source, Reason.REPLACED)
                file.flush()
                os.fsync(file.fileno())
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _reserve(self, path: Path, num_bytes: int) -> BinaryIO:
        """Creates a file of `num_bytes`, which is locked until it is closed; others leave the cache until there is room
        for it, when they are fetched."""
        end = time.monotonic() + _ROOM_SECONDS
        while not (file := self._reserved(path, num_bytes)):
            if num_bytes > self.limit or time.monotonic() > end:
                raise ValueError(f"{self.directory}: --cache-gib is too small for what is read at once: give more")
            time.sleep(_POLL_SECONDS)
        return file

    def _reserved(self, path: Path, num_bytes: int) -> BinaryIO | None:
        """Creates the file if there is room; there is none while pieces that are being fetched take it."""
        with locked(self._locks / "size") as descriptor:
            text = os.pread(descriptor, 32, 0)
            used = int(text) if text else self._removed_to(self.limit)
            if used + num_bytes > self.limit:
                used = self._removed_to(int(self.limit * _KEPT) - num_bytes)
            if used + num_bytes > self.limit:
                return None
            file = path.open("w+b")
            try:
                lock_file(file.fileno(), path)
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError:
                file.close()
                raise
            os.pwrite(descriptor, b"%32d" % (used + num_bytes), 0)
            return file

    def _removed_to(self, most: int) -> int:
        """Removes the pieces used longest ago, until at most `most` bytes are left; returns how many are left."""
        found = []
        for entry in os.scandir(self._pieces):
            with suppress(FileNotFoundError):
                status = entry.stat()
                found.append((status.st_mtime, status.st_size, entry.path))
        used = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if _is_abandoned(path) if "." in os.path.basename(path) else used > most:
                Path(path).unlink(missing_ok=True)
                used -= size
        return used


def _is_abandoned(path: str) -> bool:
    """Whether the process that fetched a piece has died."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        return lock_file(file.fileno(), Path(path))
    return False


def _end(queue: SimpleQueue[Callable[[], object] | None]) -> None:
    for _ in range(_THREADS):
        queue.put(None)


def _work(queue: SimpleQueue[Callable[[], object] | None]) -> None:
    while job := queue.get():
        with suppress(ValueError):  # whoever needs the piece meets the error
            job()
        del job  # which has the cache: it ends when nobody else has it


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Raises ValueError if --cache-dir cannot be written."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free space, or give a lower --cache-gib" if full else "give another --cache-dir"
        raise ValueError(f"--cache-dir {directory} cannot be written ({error.strerror or error}): {advice}") from None
