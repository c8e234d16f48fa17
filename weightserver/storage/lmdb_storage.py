"""One shard's LMDB environment, its transactions and its key layout.

A data directory holds LMDB's `data.mdb` and `lock.mdb`, and `owner.lock`, which the serving process keeps locked; it
records the number of a transaction that data.mdb holds, from the last time that it was opened or closed.
The environment holds five named databases; values of the first three begin with a checksum (see records.py):

    meta       ASCII key -> JSON: `identity` (format, shard, num_shards, unfinished), `spec`, `state` (epoch, ...),
               `schedule` (see schedule_change.py), and `build` if another program made the directory (see
               shard_builder.py)
    schedule   first step of a chunk, u64 big-endian -> the chunk's learning rates, float32 little-endian; plus 2^63 for
               those of a prepared change
    writers    writer, 16 bytes -> its newest number and outcome (see core/exactly_once.py)
    blocks     block u64 big-endian + (2^32 - 1 - generation) u32 big-endian -> block bytes (see blocks.py)
    changes    generation u32 big-endian + block u64 big-endian -> nothing: the blocks that have a version of it

Because the generation is inverted, the first key at or after a block's number is that block's newest version, and the
first at or after (block, generation) its newest version up to that generation. `changes` leaves generation 0 out: no
rollback deletes it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb

from weightserver.common.atomic_files import PRIVATE_FILE, sync
from weightserver.core.arrays import Int64Array
from weightserver.core.errors import DamagedFileError, ShardUnavailableError, StorageError
from weightserver.storage import directory as files
from weightserver.storage.directory import OwnerLock, translated
from weightserver.storage.integrity import check_end, check_pages
from weightserver.storage.interface import DATABASES, NEWEST, DiskUsage, Transaction
from weightserver.storage.page_cache import address, begin_reading, faults_from_disk, writing_back
from weightserver.storage.tombstone import require_current

_MAP_BYTES = 1 << 40
"""Address space for a file that is written, which may grow as long: a map takes no memory."""
_ROOM_BYTES = 256 << 20
"""The least address space after the file's pages."""
_MAX_READERS = 512
_LOCK_BYTES = 64 * (_MAX_READERS + 2)
"""Size of LMDB's lock.mdb: a header, and one slot per reader."""
_BLOCK = struct.Struct(">Q")
_BLOCK_KEY = struct.Struct(">QI")
_CHANGE = struct.Struct(">IQ")
_FAULT_CHECK_BLOCKS = 16
"""Blocks that are looked up, but for the first, before it is looked whether they were in memory."""
_MOST_SPREAD = 1.35
"""Bytes of the file that are read at most for a byte of its blocks."""
_READING_THREADS = 16
"""Threads that read blocks from the disk ahead of their use."""
_TRANSACTION = b"transaction"
"""Key, in LMDB's unnamed database, of the number of the transaction that wrote last, u64 little-endian."""
_READER_CHECK_SECONDS = 5.0
_WRITE_BACK_BYTES = 32 << 20
"""Of a transaction's blocks. From here on the disk writes while LMDB still copies pages to the system: smaller ones are
copied before a thread gains anything."""
_DAMAGE = (
    lmdb.BadChecksumError,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.ProblemError,
)
"""Errors that a sound file does not cause."""
_COPY_BYTES = 64 << 20
"""Bytes of values that `copy` writes in one transaction."""


def _newest(blocks: lmdb.Cursor[memoryview], block: int, inverted: int) -> memoryview | None:
    """The newest version of a block that is not newer than an inverted generation."""
    if blocks.set_range(_BLOCK_KEY.pack(block, inverted)) and _BLOCK.unpack_from(blocks.key())[0] == block:
        return blocks.value()
    return None


def block_key_parts(key: bytes | memoryview) -> tuple[int, int]:
    """(block, generation) of a key of `blocks`."""
    block, inverted = _BLOCK_KEY.unpack(key)
    return block, NEWEST - inverted


class _LmdbTransaction:
    """A snapshot of LMDB's, or a change."""

    def __init__(self, storage: LmdbStorage, txn: lmdb.Transaction[memoryview]) -> None:
        self.directory = storage.directory
        self._storage = storage
        self._txn = txn
        self._databases = storage.databases
        self._blocks = txn.cursor(self._databases["blocks"])
        self._changes = txn.cursor(self._databases["changes"])
        self.changed = False
        self.block_bytes = 0
        """Bytes of the blocks that were put."""

    def get(self, database: str, key: bytes) -> memoryview | None:
        return self._txn.get(key, db=self._databases[database])

    def look(self) -> None:
        """Reads the ends of every database. Raises lmdb.Error if one cannot be read."""
        for database in self._databases.values():
            with self._txn.cursor(database) as cursor:
                cursor.first()
                cursor.last()

    def put(self, database: str, key: bytes, value: bytes | bytearray) -> None:
        self.changed = True
        self._txn.put(key, value, db=self._databases[database])

    def delete(self, database: str, key: bytes) -> None:
        self.changed = True
        self._txn.delete(key, db=self._databases[database])

    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]:
        for key, value in self._txn.cursor(self._databases[database]):
            yield bytes(key), value

    def block_versions(self) -> Iterator[tuple[int, int]]:
        """(block, generation) of every stored version; reads no more than the first pages of values."""
        with self._txn.cursor(self._databases["blocks"]) as cursor:
            yield from map(block_key_parts, map(bytes, cursor.iternext(values=False)))

    def clear(self, database: str) -> None:
        self.changed = True
        self._txn.drop(self._databases[database], delete=False)

    def pages(self) -> dict[str, int]:
        """Number of pages of each database."""
        stats = {name: self._txn.stat(database) for name, database in self._databases.items()}
        return {
            name: stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for name, stat in stats.items()
        }

    def newest_block(self, block: int, *, up_to: int = NEWEST) -> memoryview | None:
        """The block's newest version of a generation ≤ `up_to`."""
        return _newest(self._blocks, block, NEWEST - up_to)

    def newest_blocks(self, blocks: Int64Array, *, up_to: int = NEWEST) -> list[memoryview | None]:
        """As `newest_block` of each, ascending, int64 [n]. Once one was not in memory, the others are read ahead."""
        cursor, inverted, found = self._blocks, NEWEST - up_to, list[memoryview | None]()
        numbers, end, faults = blocks.tolist(), 1, faults_from_disk()
        while len(found) < len(numbers):
            found += [_newest(cursor, block, inverted) for block in numbers[len(found) : end]]
            end += _FAULT_CHECK_BLOCKS
            if faults_from_disk() > faults:
                self._read_ahead(found[-1], numbers[len(found) :], up_to)
                faults = faults_from_disk()
        return found

    def _read_ahead(self, known: memoryview | None, blocks: Sequence[int], up_to: int) -> None:
        """Reads the blocks after a known one from the disk: all at once if they lie together in the file, as neighbours
        do, else in threads, because LMDB waits for each page that it uses."""
        last = self.newest_block(blocks[-1], up_to=up_to) if blocks else None
        if known and last and 0 < address(last) - address(known) < _MOST_SPREAD * len(last) * len(blocks):
            begin_reading(known, last)
        else:
            self._storage.touch(blocks[:-1], up_to)

    def next_block(self, first: int) -> int | None:
        """The first block from number `first` on that has a version."""
        if not self._blocks.set_range(_BLOCK.pack(first)):
            return None
        return block_key_parts(bytes(self._blocks.key()))[0]

    def generations(self, block: int) -> list[int]:
        """Generations of the block's versions, newest first."""
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

    def put_block(self, block: int, generation: int, value: bytes | bytearray | memoryview) -> None:
        self.changed = True
        self.block_bytes += len(value)
        self._txn.put(_BLOCK_KEY.pack(block, NEWEST - generation), value, db=self._databases["blocks"])
        if generation:
            self._txn.put(_CHANGE.pack(generation, block), b"", db=self._databases["changes"])

    def delete_block(self, block: int, generation: int) -> None:
        self.changed = True
        self._txn.delete(_BLOCK_KEY.pack(block, NEWEST - generation), db=self._databases["blocks"])
        self._txn.delete(_CHANGE.pack(generation, block), db=self._databases["changes"])

    def delete_generations(self, first: int) -> None:
        """Deletes every version of generation `first` (≥ 1) and later."""
        first_found = self._changes.set_range(_CHANGE.pack(first, 0))
        found = [bytes(key) for key in self._changes.iternext(values=False)] if first_found else []
        for generation, block in map(_CHANGE.unpack, found):
            self.delete_block(block, generation)


class LmdbStorage:
    """One shard's LMDB environment. Reads may run in any thread; writes in one thread at a time.

    It owns the directory: no other process serves or reads it meanwhile, except with `snapshot.py`.

    Args:
        allow_recreate: begin an empty shard if the directory was served before and its data file is gone.
        must_exist: refuse a directory without data, which then stays as it is.
        on_failure: called with the reason, once, when LMDB can no longer read and write. Every later call raises
            ShardUnavailableError; whether the last write was stored shows when the directory is opened again.
        scattered: open the file for reads anywhere: without readahead, which serves reading it all.

    Raises:
        StorageError: the directory cannot be used, another process serves it, or its pages are damaged.
        ValueError: it is a file, or holds other files than a shard's, which stay as they are.
    """

    def __init__(
        self,
        directory: Path,
        *,
        readonly: bool = False,
        allow_recreate: bool = False,
        must_exist: bool = False,
        on_failure: Callable[[str], None] = lambda reason: None,
        scattered: bool = False,
    ) -> None:
        self.directory = directory
        self._readonly = readonly
        self._idle = threading.Condition()
        self._num_reading = 0
        self._next_reader_check = 0.0
        self._closed = False
        self._damaged = False
        self._damage = ""
        """The first error that shows that the file is damaged."""
        self._failure = ""
        self._on_failure = on_failure
        with translated(directory), contextlib.ExitStack() as opened:
            if readonly:
                files.require_data(directory)
            else:
                files.prepare(directory, must_exist=must_exist)
            self._lock = OwnerLock(directory, readonly=readonly)
            opened.callback(self._lock.release)
            last_transaction = self._check_files(allow_recreate=allow_recreate)
            self._env = self._open_environment(readahead=not scattered)
            opened.callback(self._env.close)
            self._data = os.open(files.data_file(directory), os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, self._data)
            if os.fstat(self._data).st_size < _used_bytes(self._env):
                check_end(files.data_file(directory))
            self.databases = self._open_databases(must_exist=must_exist)
            self._require_transaction(last_transaction)
            self._reading = ThreadPoolExecutor(_READING_THREADS, "read-ahead")
            if not readonly:
                sync(directory)
                sync(directory.parent)
                self._record_last_transaction()
            opened.pop_all()

    def _check_files(self, *, allow_recreate: bool) -> int:
        """Checks the files of the locked directory; returns the transaction that its data must hold."""
        if not self._readonly:
            require_current(self.directory)
        last_transaction = files.last_transaction(self.directory)
        has_data = files.holds_data(self.directory)
        if last_transaction and not has_data:  # data that disappeared is no new shard
            if not allow_recreate:
                raise files.missing_data(self.directory)
            last_transaction = 0
        if not self._readonly:
            files.allocate(self.directory / "lock.mdb", _LOCK_BYTES)
        if has_data:
            check_pages(files.data_file(self.directory))
        return last_transaction

    def _open_environment(self, *, readahead: bool) -> lmdb.Environment:
        data, readonly = files.data_file(self.directory), self._readonly
        least = (data.stat().st_size if data.exists() else 0) + _ROOM_BYTES
        map_bytes = least if readonly else _address_space(least)
        while True:
            try:
                return lmdb.open(
                    str(self.directory),
                    map_size=map_bytes,
                    max_dbs=len(DATABASES),
                    readonly=readonly,
                    create=not readonly,
                    mode=PRIVATE_FILE,
                    lock=not readonly,
                    max_readers=_MAX_READERS,
                    readahead=readahead,
                    lib_version=0,
                )
            except lmdb.MemoryError:
                if map_bytes == least:
                    raise
                map_bytes = max(least, map_bytes // 2)

    def _require_transaction(self, last_transaction: int) -> None:
        """Raises DamagedFileError if the data file is an old copy, or LMDB takes one of its first pages for newer than
        it is."""
        with self._env.begin() as txn:
            found, written = txn.id(), txn.get(_TRANSACTION)
        if found < last_transaction or written not in (None, _number(found)):
            raise DamagedFileError(
                f"{self.directory}: data.mdb lacks transactions that it had, as after damage of its first pages or "
                "when an old copy was put back: restore it, or remove owner.lock to serve it as it is",
                ["it lacks transactions that it had"],
            )

    def _open_databases(self, *, must_exist: bool) -> dict[str, lmdb._Database]:
        """Opens the databases, and creates them in a new environment only: a missing one is not an empty one."""
        create = not self._readonly and self._env.stat()["entries"] == 0
        if create and must_exist:
            raise files.missing_data(self.directory)
        with self._env.begin(write=True) if create else contextlib.nullcontext() as txn:
            if txn is not None:
                txn.put(_TRANSACTION, _number(txn.id()))
            return {name: self._env.open_db(name.encode(), txn, create=create) for name in DATABASES}

    @contextlib.contextmanager
    def read(self) -> Iterator[_LmdbTransaction]:
        """A snapshot, to be held briefly: the file grows while old snapshots exist."""
        with self._idle:
            if self._closed:
                raise StorageError(f"{self.directory} is closed: the shard is shutting down")
            self._require_usable()
            self._num_reading += 1
        try:
            with self._using_lmdb(), self._env.begin(buffers=True) as txn:
                yield _LmdbTransaction(self, txn)
        finally:
            with self._idle:
                self._num_reading -= 1
                self._idle.notify_all()

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """An atomic change, durable when the context is left; undone when it is left by an exception.

        Raises:
            StorageError: the disk or the map is full, or LMDB found damage, after which all writes are refused.
        """
        self._require_usable()
        if self._damaged:
            raise StorageError(f"{self.directory} is damaged and takes no writes: restore it from a backup")
        self._forget_dead_readers()
        with self._using_lmdb():
            try:
                with contextlib.ExitStack() as commit, self._env.begin(write=True, buffers=True) as txn:
                    transaction = _LmdbTransaction(self, txn)
                    yield transaction
                    number = txn.id()
                    if transaction.changed:
                        txn.put(_TRANSACTION, _number(number))
                    if transaction.block_bytes >= _WRITE_BACK_BYTES:
                        commit.enter_context(writing_back(self._data))
            except (lmdb.CorruptedError, lmdb.PageNotFoundError):
                self._damaged = True
                raise
        if transaction.changed:
            self._lock.note_transaction(number)

    @contextlib.contextmanager
    def _using_lmdb(self) -> Iterator[None]:
        """Turns LMDB's errors into StorageError, and detects errors from which LMDB does not recover.

        After a meta page could not be written, LMDB refuses everything until the file is opened again.
        """
        try:
            with translated(self.directory, (lmdb.Error,)):
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
            if isinstance(error.__cause__, _DAMAGE):
                self._damage = self._damage or str(error)
            raise

    def _require_usable(self) -> None:
        if self._failure:
            raise ShardUnavailableError(self._failure)

    def _fail(self, error: lmdb.Error) -> None:
        with self._idle:
            if self._failure:
                return
            self._failure = (
                f"{self.directory}: LMDB cannot continue after an error of its file ({error}): the shard ends, and its "
                "next start shows whether the last writes were stored"
            )
        self._on_failure(self._failure)

    def _forget_dead_readers(self) -> None:
        """Frees the snapshots of processes that died while they read: the file would grow."""
        if time.monotonic() >= self._next_reader_check:
            self._env.reader_check()
            self._next_reader_check = time.monotonic() + _READER_CHECK_SECONDS

    def touch(self, blocks: Sequence[int], up_to: int) -> None:
        """Reads the newest versions of a generation ≤ `up_to` into memory, in several threads, each with a snapshot of
        its own: LMDB reads a page when it is used, and waits for each."""

        def touch(some: Sequence[int]) -> None:
            with self._env.begin(buffers=True) as txn:
                transaction = _LmdbTransaction(self, txn)
                for block in some:
                    transaction.newest_block(block, up_to=up_to)

        threads = min(_READING_THREADS, len(blocks))
        list(self._reading.map(touch, [blocks[first::threads] for first in range(threads)]))

    def problem(self) -> str:
        """Why the data can no longer be used: an error that LMDB had, or a file that is gone or was replaced. Empty if
        nothing is known. Takes a tenth of a millisecond."""
        if self._failure or self._damage:
            return self._failure or f"{self._damage}: restart the shard, which checks its data"
        path = files.data_file(self.directory)
        try:
            if not os.path.samestat(path.stat(), os.fstat(self._data)):
                return f"{path} was replaced while the shard serves it"
            with self.read() as txn:
                txn.look()
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        except (StorageError, ShardUnavailableError) as error:
            return str(error)
        return ""

    def copy(self, path: Path, unneeded: Callable[[list[int]], list[int]]) -> None:
        """Writes the environment to an empty file, without free pages and without versions that nothing needs.

        Args:
            unneeded: selects, among the generations of a block's versions, newest first, those to leave out.

        Raises:
            StorageError: the copy is incomplete, or cannot be written.
        """
        with translated(path, (lmdb.Error,)), self._env.begin(buffers=True) as txn:
            blocks = _LmdbTransaction(self, txn)
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
                map_size=_used_bytes(self._env) + _ROOM_BYTES,
                max_dbs=len(DATABASES),
                lock=False,
                sync=False,
                lib_version=0,
            ) as copied:
                for name, database in self.databases.items():
                    into = copied.open_db(name.encode())
                    needed = (item for item in txn.cursor(database) if is_needed(name, item[0]))
                    for some in _batches(needed):
                        wanted[name] += len(some)
                        with copied.begin(write=True) as writing:
                            writing.cursor(into).putmulti(some, append=True)
                with copied.begin(write=True) as writing:
                    writing.put(_TRANSACTION, _number(writing.id()))
                found = _entries(copied)
                copied.sync(True)
        if found != wanted:
            raise StorageError(f"{path} would hold {found}, not {wanted}: run 'weightserver verify {self.directory}'")

    def disk_bytes(self) -> int:
        """Bytes that the data file takes on disk."""
        return (self.directory / "data.mdb").stat().st_blocks * 512

    def disk_usage(self) -> DiskUsage:
        volume = os.statvfs(self.directory)
        with self.read() as txn:
            pages = txn.pages()
        page_bytes = self._env.stat()["psize"]
        used = {name: count * page_bytes for name, count in pages.items()}
        total = _used_bytes(self._env)
        return DiskUsage(
            used,
            free=max(0, total - sum(used.values())),
            volume_free=volume.f_bavail * volume.f_frsize,
            map_size=self._env.info()["map_size"],
        )

    def close(self) -> None:
        """Waits for running reads, whose memory closing unmaps. Later reads are refused."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._num_reading == 0)
        self._reading.shutdown()
        if not self._readonly and not self._failure:  # after a failure, what the disk holds is unknown
            self._record_last_transaction()
        self._env.close()
        os.close(self._data)
        self._lock.release()

    def _record_last_transaction(self) -> None:
        self._lock.record_transaction(self._env.info()["last_txnid"])


def _address_space(least: int) -> int:
    """Bytes of address space for a map of at least `least`: half of what else the process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return max(_MAP_BYTES, 2 * least)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return least + max(0, limit - taken - least) // 2


def _number(transaction: int) -> bytes:
    return transaction.to_bytes(8, "little")


def _used_bytes(env: lmdb.Environment) -> int:
    """Bytes up to the last page that was ever used."""
    return (int(env.info()["last_pgno"]) + 1) * int(env.stat()["psize"])


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
    """Number of entries of each database."""
    with env.begin() as txn:
        databases = {name: env.open_db(name.encode(), txn, create=False) for name in DATABASES}
        return {name: int(txn.stat(database)["entries"]) for name, database in databases.items()}
