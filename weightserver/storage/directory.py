"""A shard's directory: its files, the lock of its owner, and the last transaction that its data is known to hold."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lmdb

from weightserver.common.atomic_files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    lock_file,
    make_directory,
    make_private,
    require_empty,
)
from weightserver.core.errors import StorageError
from weightserver.storage.readers import OldReader

_OWN_FILES = frozenset({"data.mdb", "lock.mdb", "owner.lock", "lost+found"})
"""Files that may exist where a shard begins."""
_OWNER_SECONDS = 5.0
"""How long to wait for a directory that another process still serves."""

_log = logging.getLogger(__name__)
_LEAST_BYTES = 1 << 20
"""A disk with less free space counts as full."""


def data_file(directory: Path) -> Path:
    return directory / "data.mdb"


def holds_data(directory: Path) -> bool:
    data = data_file(directory)
    return data.exists() and data.stat().st_size > 0


def require_data(directory: Path) -> None:
    if not holds_data(directory):
        raise StorageError(f"{directory} holds no weight server data: give the --data-dir of a shard")


def prepare(directory: Path, *, must_exist: bool) -> None:
    """Makes the directory of a new shard, private to this user. One that holds data stays as it is.

    Raises:
        ValueError: it holds no shard, but other files.
        StorageError: it holds no data, and `must_exist`.
    """
    if holds_data(directory):
        return
    if not last_transaction(directory):
        require_empty(directory, but=_OWN_FILES)
    if must_exist:
        raise missing_data(directory)
    make_directory(directory, mode=PRIVATE_DIRECTORY)
    _make_private(directory)


def remove_access(directory: Path) -> None:
    """Removes other users' access to a shard that is going to be used, and logs that. Raises StorageError if the file
    system refuses."""
    with translated(directory, (OSError,)):
        if changed := _make_private(directory):
            _log.warning("removed the access of other users to %(paths)s", {"paths": ", ".join(map(str, changed))})


def _make_private(directory: Path) -> list[Path]:
    """Returns the paths that were changed."""
    return make_private(directory, *(directory / name for name in ("data.mdb", "lock.mdb", "owner.lock")))


def missing_data(directory: Path) -> StorageError:
    """The error to raise where a directory's data is not there."""
    if last_transaction(directory):
        return StorageError(
            f"{directory} was served before and its data.mdb is gone or empty: is its disk mounted? If its rows are "
            "lost, restore all shards from one backup"
        )
    what = "is empty" if directory.exists() else "is missing"
    return StorageError(f"{directory} {what}: is its disk mounted? Give --init to begin a new, empty shard here")


def last_transaction(directory: Path) -> int:
    """The transaction that `owner.lock` records; 0 if it is new."""
    number = _recorded(directory)[0].strip()
    return int(number) if number.isdigit() else 0


def noted_reader(directory: Path) -> dict[str, Any] | None:
    """The fields of the `OldReader` that the serving process saw when it last looked; None without."""
    try:
        found: dict[str, Any] | None = json.loads(_recorded(directory)[1])
    except (IndexError, ValueError):  # it was never served, or changes this moment
        return None
    return found


def _recorded(directory: Path) -> list[bytes]:
    """The lines of `owner.lock`: a transaction, and the oldest reader."""
    path = directory / "owner.lock"
    return path.read_bytes()[:200].split(b"\n") if path.exists() else [b""]


def allocate(path: Path, num_bytes: int) -> None:
    """Gives a file its disk space: LMDB maps its lock file, and a write without space on the disk ends the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)


class OwnerLock:
    """The locked `owner.lock` of a directory. Waits a while: the previous owner may be about to end.

    A reader of a directory without that file locks nothing.

    Raises:
        StorageError: another process serves the directory.
        OSError: its file system has no locks.
    """

    def __init__(self, directory: Path, *, readonly: bool) -> None:
        self._descriptor: int | None = None
        self._noted = b""
        path = directory / "owner.lock"
        access = os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT
        try:
            descriptor = os.open(path, access | os.O_CLOEXEC, PRIVATE_FILE)
        except FileNotFoundError:
            if readonly:
                return
            raise
        deadline = time.monotonic() + _OWNER_SECONDS
        while not lock_file(descriptor, path):
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise StorageError(
                    f"{directory} is served by another process, perhaps of a run or an open head: end it, or use "
                    "another directory"
                )
            time.sleep(0.05)
        self._descriptor = descriptor

    def note_transaction(self, number: int) -> None:
        """Records that the data holds this transaction; a power loss may undo the record."""
        assert self._descriptor is not None
        os.pwrite(self._descriptor, b"%20d\n" % number, 0)

    def note_reader(self, reader: OldReader) -> None:
        """Records the oldest reader of another process."""
        assert self._descriptor is not None
        noted = b"%-150s\n" % json.dumps(asdict(reader) if reader.pid else None).encode()
        if noted != self._noted:
            os.pwrite(self._descriptor, noted, 21)
            self._noted = noted

    def record_transaction(self, number: int) -> None:
        """Records, durably, that the data holds this transaction, and that no reader is known."""
        assert self._descriptor is not None
        self.note_transaction(number)
        self.note_reader(OldReader())
        os.fsync(self._descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def require_maps(directory: Path) -> None:
    """Raises StorageError if the file system cannot map LMDB's files into memory, lock.mdb to be written too."""
    for path, access in ((data_file(directory), 0), (directory / "lock.mdb", mmap.PROT_WRITE)):
        with contextlib.suppress(FileNotFoundError, ValueError), path.open("r+b") as file:  # ValueError: it is empty
            try:
                mmap.mmap(file.fileno(), 1, mmap.MAP_SHARED, mmap.PROT_READ | access).close()
            except OSError as error:
                raise StorageError(
                    f"the file system of {path} cannot map files ({error.strerror}): use a local disk"
                ) from error


@contextlib.contextmanager
def translated(directory: Path, kinds: tuple[type[Exception], ...] = (lmdb.Error, OSError)) -> Iterator[None]:
    """Turns errors of LMDB, and by default those of the file system, into StorageError."""
    try:
        yield
    except kinds as error:
        hint = ""
        if isinstance(error, lmdb.Error) and _is_full(directory):
            hint = " (the disk is full)"  # LMDB calls a write that is cut short an input/output error
        if isinstance(error, lmdb.MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            hint = " for a map of the file: give the process more address space (ulimit -v)"
        if isinstance(error, lmdb.MapFullError):
            hint = ": give the process more address space (ulimit -v), or restart it for a file of more than 1 TiB"
        raise StorageError(f"{directory}: {error}{hint}") from error


def _is_full(directory: Path) -> bool:
    try:
        return shutil.disk_usage(directory).free < _LEAST_BYTES
    except OSError:
        return False
