"""Reads a data file's records, besides its blocks, without a lock and without LMDB's reader slots.

While a stopped process holds a reader slot, the file grows with every write, because the pages of its snapshot cannot
be reused. Here the writer does not wait for the reader, which checks afterwards whether its pages may have been
overwritten. LMDB may end a process that reads overwritten pages: so it is one that does nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import lmdb

from weightserver.core.errors import StorageError
from weightserver.storage.directory import data_file, require_data
from weightserver.storage.interface import DATABASES
from weightserver.storage.lmdb_transaction import LmdbTransaction, open_databases

Result = TypeVar("Result")
_PATIENCE_SECONDS = 10.0
_ROOM_BYTES = 64 << 20
"""How much the file may grow between its opening and the beginning of the snapshot."""


def read_snapshot(directory: Path, read: Callable[[LmdbTransaction], Result]) -> Result:
    """The result of `read` on the last committed transaction, whose pages may change while they are read; reads again
    if that was overwritten meanwhile.

    Raises:
        StorageError: the directory holds no data, damaged data, or is written to faster than it can be read.
    """
    require_data(directory)
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        with _opened(directory) as environment, environment.begin(buffers=True) as txn:
            failure: Exception | None = None
            try:
                result = read(LmdbTransaction(directory, txn, open_databases(environment, directory, txn)))
            except lmdb.Error as error:
                failure = _damaged(directory, error)
            except StorageError as error:
                failure = error
            # Pages that a transaction frees are reused by the next but one at the earliest.
            if environment.info()["last_txnid"] <= txn.id() + 1:
                if failure is not None:
                    raise failure
                return result
        if time.monotonic() >= until:
            raise StorageError(f"{directory} is written to faster than it can be read: try again")


def _opened(directory: Path) -> lmdb.Environment:
    try:
        return lmdb.open(
            os.fsencode(directory),
            map_size=data_file(directory).stat().st_size + _ROOM_BYTES,
            max_dbs=len(DATABASES),
            readonly=True,
            lock=False,
            readahead=False,
            lib_version=0,
        )
    except lmdb.Error as error:
        raise _damaged(directory, error) from error


def _damaged(directory: Path, error: lmdb.Error) -> StorageError:
    return StorageError(f"{directory}: data.mdb is damaged ({error}): restore it from a backup")
