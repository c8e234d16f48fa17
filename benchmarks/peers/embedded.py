"""Stores inside the client's process, one row a key: LMDB and RocksDB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb

from benchmarks.peers.peer import (
    CORRECTION,
    DURABILITY,
    EXACTLY_ONCE,
    ONE_MACHINE,
    ONE_PROCESS,
    Peer,
    keys_of,
    made_rows,
    missing_of,
    rows_of,
    values_of,
)
from weightserver.core.arrays import Float32Array, Int64Array

_MAP_BYTES = 1 << 38


class LmdbRows:
    """LMDB's file of the rows; every write is one transaction, which is durable when it returns."""

    def __init__(self, directory: Path) -> None:
        self._environment = lmdb.open(str(directory), map_size=_MAP_BYTES, lib_version=0)

    def values(self, keys: list[bytes]) -> bytes:
        """The rows' bytes, one after the other."""
        with self._environment.begin(buffers=True) as transaction:
            return b"".join([transaction.get(key) for key in keys])

    def write(self, keys: list[bytes], values: list[bytes]) -> None:
        with self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(list(zip(keys, values, strict=True)))

    def close(self) -> None:
        self._environment.close()


class Lmdb(Peer):
    key, name, durable, does_not = "lmdb", "LMDB", True, (CORRECTION, EXACTLY_ONCE, ONE_MACHINE)
    _rows: LmdbRows | None = None

    def start(self) -> None:
        self._rows = LmdbRows(self.directory)

    def fill(self) -> None:
        for ids, rows in made_rows(self.num_rows):
            self.write(ids, rows)

    def fetch(self, ids: Int64Array) -> Float32Array:
        assert self._rows is not None
        return rows_of([self._rows.values(keys_of(ids))])

    def write(self, ids: Int64Array, rows: Float32Array) -> None:
        assert self._rows is not None
        self._rows.write(keys_of(ids), values_of(rows))

    def stop(self) -> None:
        if self._rows is not None:
            self._rows.close()


class RocksDb(Peer):
    """RocksDB without compression (float32 weights do not shrink) and otherwise with its defaults."""

    key, name, durable = "rocksdb", "RocksDB, WAL not synced", False
    does_not: tuple[str, ...] = (CORRECTION, DURABILITY, EXACTLY_ONCE, ONE_PROCESS)
    _database: Any = None

    @classmethod
    def missing(cls) -> str | None:
        return missing_of(modules=["rocksdict"])

    def start(self) -> None:
        from rocksdict import DBCompressionType, Options, Rdict, WriteOptions

        options = Options(raw_mode=True)
        options.set_compression_type(DBCompressionType.none())
        self._database = Rdict(str(self.directory / "rows"), options)
        self._write_options = WriteOptions()

    def fill(self) -> None:
        for ids, rows in made_rows(self.num_rows):
            self.write(ids, rows)
        self._database.flush()
        self._database.compact_range(None, None)  # which would otherwise take the other peers' time
        self._write_options.sync = self.durable

    def fetch(self, ids: Int64Array) -> Float32Array:
        return rows_of(self._database.get(keys_of(ids)))

    def write(self, ids: Int64Array, rows: Float32Array) -> None:
        """One atomic batch."""
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key, value in zip(keys_of(ids), values_of(rows), strict=True):
            batch.put(key, value)
        self._database.write(batch, self._write_options)

    def stop(self) -> None:
        if self._database is not None:
            self._database.close()


class DurableRocksDb(RocksDb):
    key, name, durable = "rocksdb-synced", "RocksDB, WAL synced", True
    does_not = (CORRECTION, EXACTLY_ONCE, ONE_PROCESS)
