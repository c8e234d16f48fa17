"""A shard's storage on a real disk whose commits fail when a test says so, and whose directory can be copied."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from weightserver.core.errors import StorageError
from weightserver.storage.interface import DATABASES, DiskUsage, Transaction
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.lmdb_transaction import LmdbTransaction

PAGE = 4_096


class DiskStorage:
    """LMDB in a folder of `root`, opened by `restart`."""

    def __init__(self, root: Path, source: Path | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=root)) / "shard"
        if source is not None:
            shutil.copytree(source, self.directory)
        self.fails = self.fails_too_late = False
        """Whether the next commit fails, and whether its changes are nevertheless stored at the next start."""
        self.num_landed = 0
        """Number of transactions that the next start will find."""
        self._broken = False
        self._before = b""
        """The data file before the last commit that changed it."""
        self._lmdb: LmdbStorage | None = None

    @property
    def contents(self) -> dict[str, list[tuple[bytes, bytes]]]:
        """The data that the next start finds."""
        with self._opened.read() as txn:
            return {name: [(key, bytes(value)) for key, value in txn.items(name)] for name in DATABASES}

    def copy(self, root: Path) -> DiskStorage:
        """A copy of the directory."""
        copied = DiskStorage(root, self.directory)
        copied._before = self._before
        return copied

    def lose_pages(self, chance: random.Random) -> None:
        """Puts some of the pages that the last commit wrote back as they were, as a disk does that loses writes."""
        data = self.directory / "data.mdb"
        now, share = bytearray(data.read_bytes()), chance.random()
        for first in range(2 * PAGE, len(now), PAGE):  # the first two, LMDB's meta pages, say which commit is there
            if chance.random() < share:
                now[first : first + PAGE] = self._before[first : first + PAGE].ljust(PAGE, b"\0")
        data.write_bytes(now)

    def restart(self) -> None:
        """Another process opens the directory."""
        self.close()
        self.fails = self._broken = False
        self._lmdb = LmdbStorage(self.directory)

    def close(self) -> None:
        if self._lmdb is not None:
            self._lmdb.close()
            self._lmdb = None

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.directory.parent)

    @property
    def _opened(self) -> LmdbStorage:
        assert self._lmdb is not None
        return self._lmdb

    @contextlib.contextmanager
    def read(self) -> Iterator[LmdbTransaction]:
        self._check()
        with self._opened.read() as txn:
            yield txn

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        self._check()
        before = (self.directory / "data.mdb").read_bytes()
        with self._opened.write() as txn:
            yield txn
            if self.fails and not self.fails_too_late:
                self._broken = True
                self._check()
        self.num_landed += 1
        if before != (self.directory / "data.mdb").read_bytes():
            self._before = before
        self._broken = self.fails
        self._check()

    def _check(self) -> None:
        """Fails like LMDB, whose environment is unusable after a meta page could not be written."""
        if self._broken:
            raise StorageError(f"{self.directory}: cannot be written: Input/output error")

    def disk_bytes(self) -> int:
        return self._opened.disk_bytes()

    def look_at_readers(self) -> None:
        self._opened.look_at_readers()

    def disk_usage(self) -> DiskUsage:
        return self._opened.disk_usage()
