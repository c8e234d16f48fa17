"""The only user of LMDB: one shard's environment, its transactions and its key layout. (snapshot.py reads bytes.)

A data directory holds LMDB's `data.mdb` and `lock.mdb`, and `owner.lock`, which the serving process keeps locked; it
holds the number of a transaction that data.mdb has, from the last time that it was opened or closed.
The environment holds five named databases; values of the first three begin with a checksum (see records.py):

    meta       ASCII key -> JSON: `identity` (format, shard, num_shards, unfinished), `spec`, `state` (epoch, ...),
               `schedule` (see schedule_change.py), and where another program made the directory `build` (see
               building.py)
    schedule   first step of a chunk, u64 big-endian -> the chunk's learning rates, float32 little-endian; and 2^63
               more: those that a prepared change is to put in its place
    writers    writer, 16 bytes -> exactly-once state, u64 + 128 bytes (see exactly_once.py)
    blocks     block u64 big-endian + (2^32 - 1 - generation) u32 big-endian -> block bytes (see blocks.py)
    changes    generation u32 big-endian + block u64 big-endian -> nothing: which blocks have a version of it

Because the generation is inverted, the first key at or after a block's number is that block's newest version, and the
first at or after (block, generation) its newest version up to that generation. `changes` leaves generation 0 out: no
rollback goes behind it.

LMDB's map of the file is as long as the file and some room, and grows with it. LMDB trusts its own pages, which have no
checksum: a directory's trees are walked before it is opened, or a wrong bit could hide rows or end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lmdb
import lmdb.verify
import numpy as np

from weightserver.common.atomic_files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    make_directory,
    make_private,
    require_empty,
    sync,
)
from weightserver.core.errors import MapGrownError, ShardUnavailableError, StorageError
from weightserver.storage.page_cache import begin_reading, is_cached, open_scattered
from weightserver.storage.tombstone import TOMBSTONE, require_current

DATABASES = ("meta", "schedule", "writers", "blocks", "changes")
_OWN_FILES = frozenset({"data.mdb", "lock.mdb", "owner.lock", TOMBSTONE, "lost+found"})
"""What may be where a shard begins."""
_ROOM_BYTES = 256 << 20
"""Address space that a transaction finds behind the file's pages; a larger one makes the map grow and is repeated."""
_MAX_READERS = 512
_LOCK_BYTES = 64 * (_MAX_READERS + 2)
"""What LMDB makes of lock.mdb: a slot a reader, and a header."""
_BLOCK = struct.Struct(">Q")
_BLOCK_KEY = struct.Struct(">QI")
_CHANGE = struct.Struct(">IQ")
_PREFETCH_SAMPLE = 8
_NODE_HEADER = struct.Struct("=IHH")
"""Of a key in LMDB's file: the value's length, flags, the key's length. The key follows, and then the value."""
_LARGE_VALUE = 0x01
"""Flag of a value that has pages of its own: the first one's number, u64, is in its place."""
_PAGE_HEADER_BYTES = 16
_OWNER_SECONDS = 5.0
"""How long a directory is waited for that another process still serves."""
_READER_CHECK_SECONDS = 5.0
_COPY_BYTES = 64 << 20
"""What `copy` writes in one transaction."""
NEWEST = _MAX_GENERATION = 2**32 - 1

_log = logging.getLogger(__name__)


def block_key_parts(key: bytes | memoryview) -> tuple[int, int]:
    """(block, generation) of a key of `blocks`."""
    block, inverted = _BLOCK_KEY.unpack(key)
    return block, _MAX_GENERATION - inverted


class Reader(Protocol):
    """One snapshot of what a shard stores beside its blocks. Buffers die with it."""

    @property
    def directory(self) -> Path: ...
    def get(self, database: str, key: bytes) -> memoryview | None: ...
    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]: ...


class Transaction(Reader, Protocol):
    """One snapshot of a shard's data, or one atomic change of it."""

    @property
    def changed(self) -> bool:
        """Whether anything was put, cleared or deleted."""
        ...

    def put(self, database: str, key: bytes, value: bytes | bytearray) -> None: ...
    def delete(self, database: str, key: bytes) -> None: ...
    def block_versions(self) -> Iterator[tuple[int, int]]: ...
    def clear(self, database: str) -> None: ...
    def newest_block(self, block: int, *, up_to: int = NEWEST) -> memoryview | None: ...
    def prefetch(self, blocks: Sequence[int], *, up_to: int = NEWEST) -> None: ...
    def next_block(self, first: int) -> int | None: ...
    def generations(self, block: int) -> list[int]: ...
    def is_changed(self, first: int) -> bool: ...
    def next_change(self, generation: int, block: int) -> tuple[int, int] | None: ...
    def put_block(self, block: int, generation: int, value: bytes | bytearray) -> None: ...
    def delete_block(self, block: int, generation: int) -> None: ...
    def delete_generations(self, first: int) -> None: ...


class _LmdbTransaction:
    def __init__(self, directory: Path, txn: lmdb.Transaction, databases: dict[str, lmdb._Database], data: int) -> None:
        self.directory = directory
        self._txn = txn
        self._databases = databases
        self._data = data
        self._blocks = txn.cursor(databases["blocks"])
        self._changes = txn.cursor(databases["changes"])
        self.changed = False

    def get(self, database: str, key: bytes) -> memoryview | None:
        value = self._txn.get(key, db=self._databases[database])
        return None if value is None else memoryview(value)

    def put(self, database: str, key: bytes, value: bytes | bytearray) -> None:
        self.changed = True
        self._txn.put(key, value, db=self._databases[database])

    def delete(self, database: str, key: bytes) -> None:
        self.changed = True
        self._txn.delete(key, db=self._databases[database])

    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]:
        for key, value in self._txn.cursor(self._databases[database]):
            yield bytes(key), memoryview(value)

    def block_versions(self) -> Iterator[tuple[int, int]]:
        """(block, generation) of every stored version, of whose values no more than the first pages are read."""
        with self._txn.cursor(self._databases["blocks"]) as cursor:
            yield from map(block_key_parts, map(bytes, cursor.iternext(values=False)))

    def clear(self, database: str) -> None:
        self.changed = True
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

    def prefetch(self, blocks: Sequence[int], *, up_to: int = NEWEST) -> None:
        """Begins to read what `newest_block` will be asked for, all at once, unless it is in memory.

        Every eighth block is looked for there: what is in memory costs little.
        """
        sample = self._extents(blocks[::_PREFETCH_SAMPLE], up_to)
        if not all(is_cached(self._data, offset + num_bytes - 1) for offset, num_bytes in sample):
            for offset, num_bytes in self._extents(blocks, up_to):
                begin_reading(self._data, offset, num_bytes)

    def _extents(self, blocks: Sequence[int], up_to: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) in the data file of the newest versions, up to `up_to`, that have pages of their own.

        LMDB tells of no page numbers, but the key that it shows is the file's own, beside which they are. To find a key
        is to read its value's first page.
        """
        page_bytes = self._txn.stat(self._databases["blocks"])["psize"]
        for block in blocks:
            if not self._blocks.set_range(_BLOCK_KEY.pack(block, _MAX_GENERATION - up_to)):
                continue
            key = self._blocks.key()
            address = np.frombuffer(key, np.uint8).__array_interface__["data"][0]
            header = ctypes.string_at(address - _NODE_HEADER.size, _NODE_HEADER.size)
            num_bytes, flags, key_bytes = _NODE_HEADER.unpack(header)
            if key[:8] == _BLOCK.pack(block) and flags & _LARGE_VALUE:
                page = int.from_bytes(ctypes.string_at(address + key_bytes, 8), sys.byteorder)
                yield page * page_bytes, _PAGE_HEADER_BYTES + num_bytes

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
        return self.next_change(first, 0) is not None

    def next_change(self, generation: int, block: int) -> tuple[int, int] | None:
        """The first (generation, block), from these on, of which there is a version; without generation 0."""
        if not self._changes.set_range(_CHANGE.pack(generation, block)):
            return None
        return _CHANGE.unpack(self._changes.key())

    def put_block(self, block: int, generation: int, value: bytes | bytearray) -> None:
        self.changed = True
        self._txn.put(_BLOCK_KEY.pack(block, _MAX_GENERATION - generation), value, db=self._databases["blocks"])
        if generation:
            self._txn.put(_CHANGE.pack(generation, block), b"", db=self._databases["changes"])

    def delete_block(self, block: int, generation: int) -> None:
        self.changed = True
        self._txn.delete(_BLOCK_KEY.pack(block, _MAX_GENERATION - generation), db=self._databases["blocks"])
        self._txn.delete(_CHANGE.pack(generation, block), db=self._databases["changes"])

    def delete_generations(self, first: int) -> None:
        """Deletes every version of generation `first` (≥ 1) and later."""
        first_found = self._changes.set_range(_CHANGE.pack(first, 0))
        found = [bytes(key) for key in self._changes.iternext(values=False)] if first_found else []
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

    It owns the directory: nobody else serves or reads it meanwhile; `snapshot.py` reads beside its owner.

    Args:
        anew: begin an empty one where the data file of a directory that was served before is gone.
        must_exist: refuse a directory without data, which then stays as it is.
        on_failure: told why, once, when LMDB can read and write no more: every call raises ShardUnavailableError from
            then on, and whether the last write is there shows when the directory is opened again.
        scattered: blocks are read anywhere, after `prefetch`: without the readahead of whoever reads all.
        room_bytes: address space to keep behind the file's pages.

    Raises:
        StorageError: the directory cannot be used, another process serves it, or its pages are damaged.
        ValueError: it is a file, or holds no shard, and other files, which stay as they are.
    """

    def __init__(
        self,
        directory: Path,
        *,
        readonly: bool = False,
        anew: bool = False,
        must_exist: bool = False,
        on_failure: Callable[[str], None] = lambda reason: None,
        scattered: bool = False,
        room_bytes: int = _ROOM_BYTES,
    ) -> None:
        self.directory = directory
        self._readonly = readonly
        self._room_bytes = room_bytes
        self._idle = threading.Condition()
        self._num_reading = 0
        self._growing = False
        self._next_reader_check = 0.0
        self._closed = False
        self._damaged = False
        self._failure = ""
        self._on_failure = on_failure
        data = directory / "data.mdb"
        with _translated(directory), contextlib.ExitStack() as opened:
            if readonly:
                _check_there(directory)
            else:
                if not holds_data(directory):
                    if not _last_transaction(directory):
                        require_empty(directory, but=_OWN_FILES)
                    if must_exist:
                        raise StorageError(_missing(directory))
                make_directory(directory, mode=PRIVATE_DIRECTORY)
                files = [directory / name for name in ("data.mdb", "lock.mdb", "owner.lock")]
                if (changed := make_private(directory, *files)) and holds_data(directory):
                    _log.warning(
                        "others than this user could read or lock %s, and cannot any more",
                        ", ".join(map(str, changed)),
                    )
            self._owner = _lock(directory, readonly=readonly)
            opened.callback(self._release)
            if not readonly:
                require_current(directory)
            last_transaction = _last_transaction(directory)
            if last_transaction and _is_gone(data):  # one that went away is no new shard
                if not anew:
                    raise StorageError(_missing(directory))
                last_transaction = 0
            if not readonly:
                _allocate(directory / "lock.mdb", _LOCK_BYTES)
            if not _is_gone(data):
                _check_integrity(directory, _Trees)
            self._env = lmdb.open(
                str(directory),
                map_size=(data.stat().st_size if data.exists() else 0) + 2 * room_bytes,
                max_dbs=len(DATABASES),
                readonly=readonly,
                create=not readonly,
                mode=PRIVATE_FILE,
                lock=not readonly,
                max_readers=_MAX_READERS,
                readahead=not scattered,
                lib_version=0,
            )
            opened.callback(self._env.close)
            self._data = open_scattered(data)
            opened.callback(os.close, self._data)
            _check_newest(directory, self._env, last_transaction)
            create = not readonly and self._env.stat()["entries"] == 0  # one that is missing is no empty one
            if create and must_exist:
                raise StorageError(_missing(directory))
            with self._env.begin(write=True) if create else contextlib.nullcontext() as txn:
                self._databases = {name: self._env.open_db(name.encode(), txn, create=create) for name in DATABASES}
            if not readonly:
                sync(directory)
                sync(directory.parent)
                self._note_last_transaction()
            opened.pop_all()

    @contextlib.contextmanager
    def read(self) -> Iterator[_LmdbTransaction]:
        """A snapshot, to be held briefly: the file grows while old snapshots live."""
        with self._idle:
            self._idle.wait_for(lambda: not self._growing)
            if self._closed:
                raise StorageError(f"{self.directory} is closed: the shard is shutting down")
            self._require_usable()
            self._num_reading += 1
        try:
            with self._using_lmdb(), self._env.begin(buffers=True) as txn:
                yield _LmdbTransaction(self.directory, txn, self._databases, self._data)
        finally:
            with self._idle:
                self._num_reading -= 1
                self._idle.notify_all()

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """An atomic change, durable when the context is left; undone when it is left by an exception.

        Raises:
            MapGrownError: the map was full; the same again finds a larger one.
            StorageError: the disk is full, or LMDB met damage, after which nothing is written any more.
        """
        self._require_usable()
        if self._damaged:
            raise StorageError(f"{self.directory} is damaged and takes no writes: restore it from a backup")
        self._forget_dead_readers()
        self._make_room()
        with self._using_lmdb():
            try:
                with self._env.begin(write=True, buffers=True) as txn:
                    yield _LmdbTransaction(self.directory, txn, self._databases, self._data)
            except lmdb.MapFullError:
                self._grow()
                raise MapGrownError(
                    f"{self.directory}: a write needed a larger map, which it has now: repeat it"
                ) from None
            except (lmdb.CorruptedError, lmdb.PageNotFoundError):
                self._damaged = True
                raise

    @contextlib.contextmanager
    def _using_lmdb(self) -> Iterator[None]:
        """Turns LMDB's errors into StorageError, and notices where it can go on no more.

        A meta page that could not be written makes LMDB refuse everything until the file is opened again.
        """
        try:
            with _translated(self.directory, (lmdb.Error,)):
                yield
        except StorageError as error:
            if not isinstance(error.__cause__, lmdb.Error):
                raise
            try:
                with self._env.begin():
                    pass
            except lmdb.PanicError:
                self._fail(error.__cause__)
                raise ShardUnavailableError(self._failure) from error.__cause__
            except lmdb.Error:  # no free slot for another reader, say
                pass
            raise

    def _require_usable(self) -> None:
        if self._failure:
            raise ShardUnavailableError(self._failure)

    def _fail(self, error: lmdb.Error) -> None:
        with self._idle:
            if self._failure:
                return
            self._failure = (
                f"{self.directory}: LMDB cannot go on after an error of its file ({error}): the shard ends, and its "
                "next start shows whether the last writes are there"
            )
        self._on_failure(self._failure)

    def _forget_dead_readers(self) -> None:
        """Another process that died while it read keeps its snapshot, and the file grows."""
        if time.monotonic() >= self._next_reader_check:
            self._env.reader_check()
            self._next_reader_check = time.monotonic() + _READER_CHECK_SECONDS

    def _make_room(self) -> None:
        if self._env.info()["map_size"] < _used_bytes(self._env) + self._room_bytes:
            self._grow()

    def _grow(self) -> None:
        """Doubles the map, or adds what address space allows. Reads use it: running ones end first, new ones wait."""
        map_bytes = self._env.info()["map_size"]
        with _translated(self.directory), self._idle:
            added_bytes = _spare_address_space(map_bytes, least=2 * self._room_bytes)
            self._growing = True
            try:
                self._idle.wait_for(lambda: self._num_reading == 0)
                self._env.set_mapsize(map_bytes + added_bytes)
            except lmdb.Error as error:  # it has no map now, and would end the process
                self._fail(error)
                raise
            finally:
                self._growing = False
                self._idle.notify_all()

    def copy(self, path: Path, unneeded: Callable[[list[int]], list[int]]) -> None:
        """Writes the environment to an empty file, without free pages and without versions that nothing needs.

        Args:
            unneeded: of the generations of a block's versions, newest first, those to leave out.

        Raises:
            StorageError: the copy is not the same, or cannot be written.
        """
        with _translated(path, (lmdb.Error,)), self._env.begin(buffers=True) as txn:
            blocks = _LmdbTransaction(self.directory, txn, self._databases, self._data)
            left_out = functools.lru_cache(1)(lambda block: frozenset(unneeded(blocks.generations(block))))

            def is_needed(name: str, key: memoryview) -> bool:
                if name == "blocks":
                    block, generation = block_key_parts(key)
                elif name == "changes":
                    generation, block = _CHANGE.unpack(key)
                else:
                    return True
                return generation not in left_out(block)

            wanted = dict.fromkeys(DATABASES, 0)
            with lmdb.open(
                str(path),
                subdir=False,
                map_size=_used_bytes(self._env) + self._room_bytes,
                max_dbs=len(DATABASES),
                lock=False,
                sync=False,
                lib_version=0,
            ) as copied:
                for name, database in self._databases.items():
                    into = copied.open_db(name.encode())
                    needed = (item for item in txn.cursor(database) if is_needed(name, item[0]))
                    for some in _batches(needed):
                        wanted[name] += len(some)
                        with copied.begin(write=True) as writing:
                            writing.cursor(into).putmulti(some, append=True)
                found = _entries(copied)
                copied.sync(True)
        if found != wanted:
            raise StorageError(f"{path} would hold {found}, not {wanted}: run 'weightserver verify {self.directory}'")

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
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._num_reading == 0)
        if self._owner is not None and not self._readonly and not self._failure:  # what it has on the disk is unknown
            self._note_last_transaction()
        self._env.close()
        os.close(self._data)
        self._release()

    def _note_last_transaction(self) -> None:
        assert self._owner is not None
        os.pwrite(self._owner, b"%20d\n" % self._env.info()["last_txnid"], 0)
        os.fsync(self._owner)

    def _release(self) -> None:
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


class _Verifier(lmdb.verify._Verifier):
    """LMDB's, that also notices where the file's first two pages are not of consecutive transactions. LMDB takes the
    higher number for the newest: by a damaged number it would serve the one before."""

    def load_metas(self) -> None:
        super().load_metas()  # type: ignore[no-untyped-call]
        numbers = [self._read_meta(page, self.psize).txnid for page in range(2)]  # type: ignore[no-untyped-call]
        if abs(numbers[0] - numbers[1]) > 1:
            self.err(f"the first pages are of transactions {numbers[0]} and {numbers[1]}")  # type: ignore[no-untyped-call]


class _Trees(_Verifier):
    """Looks at the pages of all trees, a thousandth of the file, and leaves those of large values alone."""

    def _bigdata(
        self, ctx: dict[str, Any], pgno: int, i: int, buf: bytes, doff: int, dsize: int, want_bytes: bool
    ) -> bytes | None:
        if ctx["is_free"]:
            arguments = (ctx, pgno, i, buf, doff, dsize, want_bytes)
            return super()._bigdata(*arguments)  # type: ignore[no-untyped-call, no-any-return]
        num_pages = (self.hdrsz - 1 + dsize) // self.psize + 1
        ctx["overflow"] += num_pages
        end = (int.from_bytes(buf[doff : doff + 8], sys.byteorder) + num_pages) * self.psize
        if end > self.filesize:  # they would kill the process that reads them; free pages may lie there
            self.err(f"it has {self.filesize} bytes, its pages take {end}")  # type: ignore[no-untyped-call]
        return None

    def _check_cover(self) -> None:
        """Of free pages and others."""


def structural_problems(directory: Path) -> list[str]:
    """What is wrong with LMDB's own pages, read as bytes: nothing of a damaged file is trusted.

    Raises:
        StorageError: another process serves the directory, or it holds no data.
    """
    with _translated(directory):
        _check_there(directory)
        owner = _lock(directory, readonly=True)
        try:
            return _problems(directory, _Verifier)
        finally:
            if owner is not None:
                os.close(owner)


def check_integrity(directory: Path) -> None:
    """Raises StorageError where LMDB's own pages are damaged, another process serves them, or there are none."""
    if problems := structural_problems(directory):
        raise _damage(directory, problems)


def _check_integrity(directory: Path, verifier: type[_Verifier]) -> None:
    if problems := _problems(directory, verifier):
        raise _damage(directory, problems)


def _problems(directory: Path, verifier: type[_Verifier]) -> list[str]:
    data = directory / "data.mdb"
    try:
        with data.open("rb") as file:
            return [str(problem) for problem in verifier(file, data.stat().st_size).verify()]  # type: ignore[no-untyped-call]
    except lmdb.verify.VerifyError as error:
        return [str(error)]


def _damage(directory: Path, problems: list[str]) -> StorageError:
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return StorageError(f"{directory}: data.mdb is damaged ({problems[0]}{more}): restore it from a backup")


@contextlib.contextmanager
def _translated(directory: Path, kinds: tuple[type[Exception], ...] = (lmdb.Error, OSError)) -> Iterator[None]:
    """Turns LMDB's errors, and the file system's unless told otherwise, into StorageError."""
    try:
        yield
    except kinds as error:
        hint = ""
        if "Input/output" in str(error):
            hint = " (is the disk full?)"  # LMDB calls a write that is cut short so
        if isinstance(error, lmdb.MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            hint = " for a map of the file: give the process more address space (ulimit -v)"
        raise StorageError(f"{directory}: {error}{hint}") from error


def _lock(directory: Path, *, readonly: bool) -> int | None:
    """The descriptor of the locked owner.lock. Waits a while: the process before this one may be about to end.

    None where there is none to lock and nothing can be written.
    """
    path = directory / "owner.lock"
    access = os.O_RDONLY if readonly else os.O_RDWR
    try:
        descriptor = os.open(path, access | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError:
        if not readonly or path.exists():
            raise
        return None
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
                f"{directory} is served by another process: stop that one, or give this one a --data-dir of its own"
            ) from None
        return descriptor


def _allocate(path: Path, num_bytes: int) -> None:
    """LMDB writes to its lock file as to memory: one without room on the disk would end the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)


def _check_there(directory: Path) -> None:
    if not (directory / "data.mdb").exists():
        raise StorageError(f"{directory} holds no weight server data: give the --data-dir of a shard")


def holds_data(directory: Path) -> bool:
    return not _is_gone(directory / "data.mdb")


def _missing(directory: Path) -> str:
    """What to say of a directory whose data is not there."""
    if _last_transaction(directory):
        return (
            f"{directory} was served before and its data.mdb is gone or empty: is its disk mounted? Where its rows are "
            "lost, restore all shards from one backup"
        )
    what = "is empty" if directory.exists() else "is missing"
    return f"{directory} {what}: is its disk mounted? Give --init to begin a new, empty shard here"


def _last_transaction(directory: Path) -> int:
    """What `owner.lock` says; 0 where it is new."""
    path = directory / "owner.lock"
    text = path.read_bytes()[:32].strip() if path.exists() else b""
    return int(text) if text.isdigit() else 0


def _is_gone(data: Path) -> bool:
    return not (data.exists() and data.stat().st_size)


def _check_newest(directory: Path, env: lmdb.Environment, last_transaction: int) -> None:
    """An old copy is not the shard's data."""
    if env.info()["last_txnid"] < last_transaction:
        raise StorageError(
            f"{directory}: data.mdb lacks transactions that it had, as after damage of its first pages or "
            "when an old copy was put back: restore it, or remove owner.lock to serve it as it is"
        )


def _spare_address_space(wanted: int, *, least: int) -> int:
    """Bytes of address space that the process can still take: `wanted`, or a half, a quarter, ... of it, or `least`.

    LMDB unmaps the file before it maps more of it, and has lost its map where that fails: so this tries first. Linux
    counts shared memory without a file against RAM and swap, which a shard may exceed. A private mapping that is only
    read takes addresses alone, as LMDB's map of the file does, whatever vm.overcommit_memory says.

    Raises:
        OSError: not even `least` bytes are left (ENOMEM).
    """
    while True:
        try:  # a little more: other threads may take some before LMDB does
            mmap.mmap(-1, wanted + _ROOM_BYTES, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ).close()
        except OSError:
            if wanted <= least:
                raise
            wanted = max(least, wanted // 2)
        else:
            return wanted


def _used_bytes(env: lmdb.Environment) -> int:
    """Up to the last page that was ever used."""
    return int((env.info()["last_pgno"] + 1) * env.stat()["psize"])


def _batches(items: Iterable[tuple[memoryview, memoryview]]) -> Iterator[list[tuple[memoryview, memoryview]]]:
    """The same items, some 64 MiB of values at a time."""
    some, num_bytes = list[tuple[memoryview, memoryview]](), 0
    for key, value in items:
        some.append((key, value))
        num_bytes += len(value)
        if num_bytes >= _COPY_BYTES:
            yield some
            some, num_bytes = [], 0
    if some:
        yield some


def _entries(env: lmdb.Environment) -> dict[str, int]:
    """How many each database has."""
    with env.begin() as txn:
        databases = {name: env.open_db(name.encode(), txn, create=False) for name in DATABASES}
        return {name: int(txn.stat(database)["entries"]) for name, database in databases.items()}
