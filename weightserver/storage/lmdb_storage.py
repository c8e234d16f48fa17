"""One shard's LMDB environment.

A data directory holds LMDB's `data.mdb` and `lock.mdb`, and `owner.lock`, which the serving process keeps locked; it
records the number of a transaction that data.mdb holds, and the oldest reader of another process.
See `lmdb_transaction` for what is in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from weightserver.common.atomic_files import PRIVATE_FILE, sync
from weightserver.core.errors import DamagedFileError, ShardUnavailableError, StorageError
from weightserver.storage import directory as files
from weightserver.storage.contents import Contents
from weightserver.storage.directory import OwnerLock, translated
from weightserver.storage.integrity import check_end, check_pages
from weightserver.storage.interface import DATABASES, DiskUsage, Transaction
from weightserver.storage.lmdb_transaction import CONTENTS, LmdbTransaction, open_databases
from weightserver.storage.page_cache import writing_back
from weightserver.storage.readers import Readers

if TYPE_CHECKING:
    from weightserver.storage.lmdb_transaction import Databases

_MAP_BYTES = 1 << 40
"""Address space for a file that is written, which may grow as long: a map takes no memory."""
_ROOM_BYTES = 256 << 20
"""The least address space after the file's pages."""
_MAX_READERS = 512
_LOCK_BYTES = 64 * (_MAX_READERS + 2)
"""Size of LMDB's lock.mdb: a header, and one slot per reader."""
_READING_THREADS = 16
"""Threads that read blocks from the disk ahead of their use."""
_WRITE_BACK_BYTES = 32 << 20
"""Bytes of a transaction's blocks from which on the disk writes while LMDB still copies pages to the system: fewer
are copied before a thread gains anything."""
_MADE = 1
"""Number of the transaction that makes the databases of a new directory."""
_DAMAGE = (
    lmdb.BadChecksumError,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.ProblemError,
)
"""Errors that a sound file does not cause."""


_log = logging.getLogger(__name__)


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
        self._written_bytes = 0
        self._closed = False
        self._damage = ""
        """The first error that shows that the file is damaged: it takes no more writes."""
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
            self._readers = Readers(self._env)
            self._data = os.open(files.data_file(directory), os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, self._data)
            if os.fstat(self._data).st_size < _used_bytes(self._env):
                check_end(files.data_file(directory))
            self._databases = self._open_databases(must_exist=must_exist)
            self._contents = self._read_contents(last_transaction, must_exist=must_exist)
            """The value that the last transaction stored."""
            self._reading = ThreadPoolExecutor(_READING_THREADS, "read-ahead")
            if not readonly:
                sync(directory)
                sync(directory.parent)
                self._record_last_transaction()
            opened.pop_all()

    def _check_files(self, *, allow_recreate: bool) -> int:
        """Checks the files of the locked directory; returns the transaction that its data must hold."""
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
        is_new = not files.holds_data(self.directory)
        least = (data.stat().st_size if data.exists() else 0) + _ROOM_BYTES
        try:
            return lmdb.open(
                os.fsencode(self.directory),
                map_size=least if readonly else _address_space(least),
                max_dbs=len(DATABASES),
                readonly=readonly,
                create=not readonly,
                mode=PRIVATE_FILE,
                lock=not readonly,
                max_readers=_MAX_READERS,
                readahead=readahead,
                lib_version=0,
            )
        except lmdb.Error:
            if not readonly:
                files.require_maps(self.directory)
                if is_new:
                    data.unlink(missing_ok=True)  # a full disk may have taken a part, which would count as damage
            raise

    def _read_contents(self, last_transaction: int, *, must_exist: bool) -> bytes:
        """Raises DamagedFileError if the data file is an old copy, or LMDB takes one of its first pages for newer than
        it is, or lost those that it wrote last; StorageError if nothing was written after the databases were made."""
        with self._env.begin() as txn:
            number, stored = txn.id(), txn.get(CONTENTS) or b""
        if number < last_transaction or not Contents.is_of(stored, number):
            raise DamagedFileError(
                f"{self.directory}: data.mdb lacks transactions that it had, as after damage of its first pages or "
                "when an old copy was put back: restore it, or remove owner.lock to serve it as it is",
                ["it lacks transactions that it had"],
            )
        if must_exist and number == _MADE:
            raise StorageError(
                f"{self.directory} holds no shard yet: repeat the 'restore', 'reshard' or 'serve --init' that was "
                "stopped"
            )
        return stored

    def _open_databases(self, *, must_exist: bool) -> Databases:
        """Opens the databases, and creates them in a new environment only: a missing one is not an empty one."""
        create = not self._readonly and self._env.stat()["entries"] == 0
        if create and must_exist:
            raise files.missing_data(self.directory)
        with self._env.begin(write=True) if create else contextlib.nullcontext() as txn:
            if txn is not None:
                txn.put(CONTENTS, Contents().packed(txn.id()))
            return open_databases(self._env, self.directory, txn, create=create)

    @contextlib.contextmanager
    def read(self) -> Iterator[LmdbTransaction]:
        """A snapshot, to be held briefly: the file grows while old snapshots exist."""
        with self._idle:
            if self._closed:
                raise StorageError(f"{self.directory} is closed: the shard is shutting down")
            self._require_usable()
            self._num_reading += 1
        try:
            with self._using_lmdb(), self._env.begin(buffers=True) as txn:
                yield LmdbTransaction(self.directory, txn, self._databases, touch=self._touch)
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
        if self._damage:
            raise StorageError(self._damage)
        with (
            self._using_lmdb(),
            contextlib.ExitStack() as commit,
            self._env.begin(write=True, buffers=True) as txn,
        ):
            contents = self._contents_found(txn)
            transaction = LmdbTransaction(self.directory, txn, self._databases, touch=self._touch, contents=contents)
            yield transaction
            number, changed = txn.id(), contents.packed(txn.id())
            if transaction.changed:
                txn.put(CONTENTS, changed)
            if transaction.block_bytes >= _WRITE_BACK_BYTES:
                commit.enter_context(writing_back(self._data))
        self._written_bytes += transaction.block_bytes
        if transaction.changed:
            self._contents = changed
            try:
                self._lock.note_transaction(number)
            except OSError as error:  # the change is durable: whoever made it must not take it for undone
                _log.warning("%(path)s cannot be written: %(reason)s", {"path": "owner.lock", "reason": str(error)})

    def _contents_found(self, txn: lmdb.Transaction) -> Contents:
        """Raises DamagedFileError if the last transaction is not there any more."""
        stored = bytes(txn.get(CONTENTS) or b"")
        if stored != self._contents:
            problem = "it lacks its last transaction, which the disk confirmed"
            self._fail(f"{self.directory}: data.mdb is damaged ({problem})")
            raise DamagedFileError(self._failure, [problem])
        return Contents(stored)

    @contextlib.contextmanager
    def _using_lmdb(self) -> Iterator[None]:
        """Turns LMDB's errors into StorageError, detects errors from which LMDB does not recover, and keeps damage.

        After a meta page could not be written, LMDB refuses everything until the file is opened again.
        """
        try:
            with translated(self.directory, (lmdb.Error,)):
                yield
        except StorageError as error:
            if isinstance(error, DamagedFileError):
                self._damage = self._damage or str(error)
            if not isinstance(error.__cause__, lmdb.Error):
                raise
            try:
                with self._env.begin():
                    pass
            except lmdb.PanicError:
                self._fail(f"{self.directory}: LMDB cannot continue after an error of its file ({error.__cause__})")
                raise ShardUnavailableError(self._failure) from error.__cause__
            except lmdb.Error:  # no free slot for another reader, say
                pass
            if isinstance(error.__cause__, _DAMAGE):
                self._damage = self._damage or f"{error}: restart the shard, which checks its data"
            raise

    def _require_usable(self) -> None:
        if self._failure:
            raise ShardUnavailableError(self._failure)

    def _fail(self, problem: str) -> None:
        with self._idle:
            if self._failure:
                return
            self._failure = f"{problem}: the shard ends, and its next start shows whether the last writes were stored"
        self._on_failure(self._failure)

    def _touch(self, keys: list[bytes]) -> None:
        """Reads blocks with these keys into memory, in several threads, each with a snapshot of its own: LMDB reads a
        page when it is used, and waits for each."""

        def touch(some: list[bytes]) -> None:
            with self._env.begin(buffers=True) as txn, txn.cursor(self._databases["blocks"]) as cursor:
                for key in some:
                    cursor.set_key(key)

        threads = min(_READING_THREADS, len(keys))
        list(self._reading.map(touch, [keys[first::threads] for first in range(threads)]))

    def problem(self) -> str:
        """Why the data can no longer be used: an error that LMDB had, or a file that is gone or was replaced. Empty if
        nothing is known. Takes a tenth of a millisecond."""
        if self._failure or self._damage:
            return self._failure or self._damage
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

    def look_at_readers(self) -> None:
        """See `Storage.look_at_readers`."""
        with self.read() as txn:  # which keeps the lock's file open too
            self._env.reader_check()
            oldest = self._readers.oldest(self._free_bytes(txn.disk_bytes()), self._written_bytes)
            with contextlib.suppress(OSError):  # the metrics tell of it too
                self._lock.note_reader(oldest)

    def disk_bytes(self) -> int:
        """Bytes that the data file takes on disk."""
        return os.fstat(self._data).st_blocks * 512

    def disk_usage(self) -> DiskUsage:
        volume = os.statvfs(self.directory)
        with self.read() as txn:  # which keeps the environment open
            used = txn.disk_bytes()
            free = self._free_bytes(used)
            return DiskUsage(
                used,
                free=free,
                reader=self._readers.oldest(free, self._written_bytes),
                volume_free=volume.f_bavail * volume.f_frsize,
                map_size=self._env.info()["map_size"],
            )

    def _free_bytes(self, used: dict[str, int]) -> int:
        return max(0, _used_bytes(self._env) - sum(used.values()))

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


def _used_bytes(env: lmdb.Environment) -> int:
    """Bytes up to the last page that was ever used."""
    return (int(env.info()["last_pgno"]) + 1) * int(env.stat()["psize"])
