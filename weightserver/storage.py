"""The only user of LMDB: one shard's environment, its transactions and its key layout.

A data directory holds LMDB's `data.mdb` and `lock.mdb`, and `owner.lock`, which the serving process keeps locked; it
holds the number of a transaction that data.mdb has, from the last time that it was opened or closed.
The environment holds five named databases:

    meta       ASCII key -> JSON: `identity` (format, shard, num_shards), `spec`, `state` (epoch, clock, ...), and
               where another program made the directory `build` (see building.py)
    schedule   first step of a chunk, u64 big-endian -> the chunk's learning rates, float32 little-endian
    writers    writer, 16 bytes -> exactly-once state, u64 + 128 bytes (see shard.py)
    blocks     block u64 big-endian + (2^32 - 1 - generation) u32 big-endian -> block bytes (see blocks.py)
    changes    generation u32 big-endian + block u64 big-endian -> nothing: which blocks have a version of it

Because the generation is inverted, the first key at or after a block's number is that block's newest version, and the
first at or after (block, generation) its newest version up to that generation. `changes` leaves generation 0 out: no
rollback goes behind it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import lmdb
import lmdb.verify

from weightserver.errors import StorageError
from weightserver.files import require_empty, sync

DATABASES = ("meta", "schedule", "writers", "blocks", "changes")
_MAP_BYTES = 1 << 44
"""Address space kept for the map; the file itself only grows as it is written."""
_BLOCK = struct.Struct(">Q")
_BLOCK_KEY = struct.Struct(">QI")
_CHANGE = struct.Struct(">IQ")
_OWNER_SECONDS = 5.0
"""How long a directory is waited for that another process still serves."""
_READER_CHECK_SECONDS = 5.0
NEWEST = _MAX_GENERATION = 2**32 - 1


def block_key_parts(key: bytes) -> tuple[int, int]:
    """(block, generation) of a key of `blocks`."""
    block, inverted = _BLOCK_KEY.unpack(key)
    return block, _MAX_GENERATION - inverted


class Transaction(Protocol):
    """One snapshot of a shard's data, or one atomic change of it. Buffers die with it."""

    def get(self, database: str, key: bytes) -> memoryview | None: ...
    def put(self, database: str, key: bytes, value: bytes | bytearray) -> None: ...
    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]: ...
    def clear(self, database: str) -> None: ...
    def newest_block(self, block: int, *, up_to: int = NEWEST) -> memoryview | None: ...
    def next_block(self, first: int) -> int | None: ...
    def generations(self, block: int) -> list[int]: ...
    def is_changed(self, first: int) -> bool: ...
    def put_block(self, block: int, generation: int, value: bytes | bytearray) -> None: ...
    def delete_block(self, block: int, generation: int) -> None: ...
    def delete_generations(self, first: int) -> None: ...


class _LmdbTransaction:
    def __init__(self, txn: lmdb.Transaction, databases: dict[str, lmdb._Database]) -> None:
        self._txn = txn
        self._databases = databases
        self._blocks = txn.cursor(databases["blocks"])

    def get(self, database: str, key: bytes) -> memoryview | None:
        value = self._txn.get(key, db=self._databases[database])
        return None if value is None else memoryview(value)

    def put(self, database: str, key: bytes, value: bytes | bytearray) -> None:
        self._txn.put(key, value, db=self._databases[database])

    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]:
        for key, value in self._txn.cursor(self._databases[database]):
            yield bytes(key), memoryview(value)

    def clear(self, database: str) -> None:
        self._txn.drop(self._databases[database], delete=False)

    def pages(self) -> dict[str, int]:
        """Of each database."""
        stats = {name: self._txn.stat(database) for name, database in self._databases.items()}
        return {
            name: stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for name, stat in stats.items()
        }

    def newest_block(self, block: int, *, up_to: int = NEWEST) -> memoryview | None:
        """The block's newest version of a generation ≤ `up_to`."""
        if not self._blocks.set_range(_BLOCK_KEY.pack(block, _MAX_GENERATION - up_to)):
            return None
        if self._blocks.key()[:8] != _BLOCK.pack(block):
            return None
        return memoryview(self._blocks.value())

    def next_block(self, first: int) -> int | None:
        """The first block from number `first` on that has a version."""
        if not self._blocks.set_range(_BLOCK.pack(first)):
            return None
        return block_key_parts(bytes(self._blocks.key()))[0]

    def generations(self, block: int) -> list[int]:
        """Of the block's versions, newest first."""
        prefix, found = _BLOCK.pack(block), []
        more = self._blocks.set_range(prefix)
        while more and self._blocks.key()[:8] == prefix:
            found.append(block_key_parts(bytes(self._blocks.key()))[1])
            more = self._blocks.next()
        return found

    def is_changed(self, first: int) -> bool:
        """Whether a block has a version of generation `first` (≥ 1) or later."""
        return bool(self._txn.cursor(self._databases["changes"]).set_range(_CHANGE.pack(first, 0)))

    def put_block(self, block: int, generation: int, value: bytes | bytearray) -> None:
        self._txn.put(_BLOCK_KEY.pack(block, _MAX_GENERATION - generation), value, db=self._databases["blocks"])
        if generation:
            self._txn.put(_CHANGE.pack(generation, block), b"", db=self._databases["changes"])

    def delete_block(self, block: int, generation: int) -> None:
        self._txn.delete(_BLOCK_KEY.pack(block, _MAX_GENERATION - generation), db=self._databases["blocks"])
        self._txn.delete(_CHANGE.pack(generation, block), db=self._databases["changes"])

    def delete_generations(self, first: int) -> None:
        """Deletes every version of generation `first` (≥ 1) and later."""
        changes = self._txn.cursor(self._databases["changes"])
        found = (
            [bytes(key) for key in changes.iternext(values=False)] if changes.set_range(_CHANGE.pack(first, 0)) else []
        )
        for generation, block in map(_CHANGE.unpack, found):
            self.delete_block(block, generation)


@dataclass(frozen=True)
class DiskUsage:
    """Where the bytes of a data file go, and what its volume has left."""

    databases: dict[str, int]
    """Bytes of each database's pages."""
    free: int
    """Bytes of pages that writes will use again, and of LMDB's own."""
    volume_free: int
    map_size: int
    """What the data file can grow to."""


class Storage(Protocol):
    """Where a shard keeps its data."""

    directory: Path

    def read(self) -> AbstractContextManager[Transaction]: ...
    def write(self) -> AbstractContextManager[Transaction]: ...
    def disk_bytes(self) -> int: ...
    def disk_usage(self) -> DiskUsage: ...


class LmdbStorage:
    """One shard's LMDB environment. Reads may run in any thread; writes in one thread at a time.

    Args:
        anew: begin an empty one where the data file of a directory that was served before is gone.

    Raises:
        StorageError: the directory cannot be used, another process serves it, or LMDB reports damage.
    """

    def __init__(self, directory: Path, *, readonly: bool = False, anew: bool = False) -> None:
        self.directory = directory
        self._owner: int | None = None
        self._idle = threading.Condition()
        self._num_reading = 0
        self._next_reader_check = 0.0
        self._closed = False
        with _translated(directory):
            if readonly:
                _check_there(directory)
            else:
                directory.mkdir(parents=True, exist_ok=True)
                self._owner = _lock(directory / "owner.lock")
            try:
                last_transaction = 0 if self._owner is None else _last_transaction(self._owner)
                if last_transaction and _is_gone(directory / "data.mdb"):  # one that went away is no new shard
                    if not anew:
                        raise StorageError(
                            f"{directory} was served before and its data.mdb is gone or empty: restore it from a "
                            "backup, or remove the directory to begin with an empty shard"
                        )
                    last_transaction = 0
                self._env = lmdb.open(
                    str(directory),
                    map_size=_MAP_BYTES,
                    max_dbs=len(DATABASES),
                    readonly=readonly,
                    create=not readonly,
                    max_readers=512,
                    lib_version=0,
                )
                _check_length(directory / "data.mdb", self._env)
                _check_newest(directory, self._env, last_transaction)
                self._databases = {name: self._env.open_db(name.encode(), create=not readonly) for name in DATABASES}
            except BaseException:
                self._release()
                raise
            if self._owner is not None:
                sync(directory)
                sync(directory.parent)
                self._note_last_transaction()

    @contextlib.contextmanager
    def read(self) -> Iterator[_LmdbTransaction]:
        """A snapshot, to be held briefly: the file grows while old snapshots live."""
        with self._idle:
            if self._closed:
                raise StorageError(f"{self.directory} is closed: the shard is shutting down")
            self._num_reading += 1
        try:
            with _translated(self.directory), self._env.begin(buffers=True) as txn:
                yield _LmdbTransaction(txn, self._databases)
        finally:
            with self._idle:
                self._num_reading -= 1
                self._idle.notify_all()

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """An atomic change, durable when the context is left; undone when it is left by an exception."""
        self._forget_dead_readers()
        with _translated(self.directory), self._env.begin(write=True, buffers=True) as txn:
            yield _LmdbTransaction(txn, self._databases)

    def _forget_dead_readers(self) -> None:
        """Another process that died while it read keeps its snapshot, and the file grows."""
        if time.monotonic() >= self._next_reader_check:
            self._env.reader_check()
            self._next_reader_check = time.monotonic() + _READER_CHECK_SECONDS

    def disk_bytes(self) -> int:
        """What the data file takes on disk."""
        return (self.directory / "data.mdb").stat().st_blocks * 512

    def disk_usage(self) -> DiskUsage:
        volume = os.statvfs(self.directory)
        with self.read() as txn:
            pages = txn.pages()
        page_bytes = self._env.stat()["psize"]
        used = {name: count * page_bytes for name, count in pages.items()}
        total = (self._env.info()["last_pgno"] + 1) * page_bytes
        return DiskUsage(
            used,
            free=max(0, total - sum(used.values())),
            volume_free=volume.f_bavail * volume.f_frsize,
            map_size=self._env.info()["map_size"],
        )

    def close(self) -> None:
        """Waits for running reads: what they look at is memory that closing unmaps. Later ones are refused."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._num_reading == 0)
        if self._owner is not None:
            self._note_last_transaction()
        self._env.close()
        self._release()

    def _note_last_transaction(self) -> None:
        assert self._owner is not None
        os.pwrite(self._owner, b"%20d\n" % self._env.info()["last_txnid"], 0)
        os.fsync(self._owner)

    def _release(self) -> None:
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


def structural_problems(directory: Path) -> list[str]:
    """What is wrong with LMDB's own pages, read as bytes: nothing of a damaged file is trusted.

    Raises:
        StorageError: another process serves the directory, or it holds no data.
    """
    with _translated(directory):
        _check_there(directory)
        owner = _lock(directory / "owner.lock")
        try:
            return [str(problem) for problem in lmdb.verify.verify(str(directory))]  # type: ignore[no-untyped-call]
        except lmdb.verify.VerifyError as error:
            return [str(error)]
        finally:
            os.close(owner)


@contextlib.contextmanager
def exclusively(directory: Path) -> Iterator[None]:
    """Keeps everybody else from serving a directory meanwhile.

    Raises:
        StorageError: another process serves it, or it holds no data, cut data or an old copy.
    """
    with _translated(directory):
        _check_there(directory)
        owner = _lock(directory / "owner.lock")
    try:
        with (
            _translated(directory),
            lmdb.open(str(directory), map_size=_MAP_BYTES, readonly=True, lib_version=0) as env,
        ):
            _check_length(directory / "data.mdb", env)
            _check_newest(directory, env, _last_transaction(owner))
        yield
    finally:
        os.close(owner)


def compact(source: Path, target: Path) -> None:
    """Copies a directory that nobody serves to a new one, without the pages that are free.

    Raises:
        ValueError: the new one is not empty.
        StorageError: LMDB reports damage, the disk is full, or another process serves the directory.
    """
    require_empty(target)
    with exclusively(source), _translated(target):
        partial = target.with_name(f".{target.name}.compacting")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            entries = []
            for directory in (source, partial):
                with lmdb.open(
                    str(directory), map_size=_MAP_BYTES, max_dbs=len(DATABASES), readonly=True, lib_version=0
                ) as env:
                    if directory is source:
                        env.copy(str(partial), compact=True)
                    with env.begin() as txn:
                        databases = {name: env.open_db(name.encode(), txn, create=False) for name in DATABASES}
                        entries.append({name: txn.stat(database)["entries"] for name, database in databases.items()})
            if entries[0] != entries[1]:
                raise StorageError(f"{target} would hold {entries[1]}, not {entries[0]}: run 'weightserver verify'")
            (partial / "lock.mdb").unlink(missing_ok=True)
            sync(partial / "data.mdb")
            sync(partial)
            partial.replace(target)
            sync(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def _translated(directory: Path) -> Iterator[None]:
    """Turns LMDB's and the file system's errors into StorageError."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        full = " (is the disk full?)" if "Input/output" in str(error) else ""  # LMDB calls a write that is cut short so
        raise StorageError(f"{directory}: {error}{full}") from error


def _lock(path: Path) -> int:
    """Waits a while: the process before this one may be about to end."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + _OWNER_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            os.close(descriptor)
            raise StorageError(
                f"{path.parent} is served by another process: stop that one, or give this one a --data-dir of its own"
            ) from None
        return descriptor


def _check_there(directory: Path) -> None:
    if not (directory / "data.mdb").exists():
        raise StorageError(f"{directory} holds no weight server data: give the --data-dir of a shard")


def _last_transaction(owner: int) -> int:
    """What `owner.lock` says; 0 where it is new."""
    text = os.pread(owner, 32, 0).strip()
    return int(text) if text.isdigit() else 0


def _is_gone(data: Path) -> bool:
    return not (data.exists() and data.stat().st_size)


def _check_length(data: Path, env: lmdb.Environment) -> None:
    """Pages beyond the file's end would kill the process that reads them."""
    length, expected = data.stat().st_size, (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if length < expected:
        raise StorageError(f"{data} has {length} bytes, its pages take {expected}: restore it from a backup")


def _check_newest(directory: Path, env: lmdb.Environment, last_transaction: int) -> None:
    """An old copy is not the shard's data."""
    if env.info()["last_txnid"] < last_transaction:
        raise StorageError(
            f"{directory}: data.mdb lacks transactions that it had, as after damage of its first pages or "
            "when an old copy was put back: restore it, or remove owner.lock to serve it as it is"
        )
