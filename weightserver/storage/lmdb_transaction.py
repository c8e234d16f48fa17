"""LMDB's transactions, and the layout of its keys.

The environment holds five named databases; values of the first three begin with a checksum (see records.py):

    meta       ASCII key -> JSON: `identity` (format, shard, num_shards, unfinished), `spec`, `state` (epoch, ...),
               `checkpoints`, `lineage`, `peers`, and `origin` if the directory was filled (see shard_builder.py)
    schedule   first step of a chunk, u64 big-endian -> the chunk's learning rates, float32 little-endian
    writers    writer, 16 bytes -> its newest number and outcome (see core/exactly_once.py)
    versions   block u64 big-endian + (2^32 - 1 - generation) u32 big-endian -> the id of the write that stored this
               version, 8 bytes
    blocks     block u64 big-endian + write id, 8 bytes -> block bytes (see blocks.py)

and the unnamed one, beside the roots of these, `contents` (see contents.py).

Because the generation is inverted, the first key of `versions` at or after a block's number is that block's newest
version, and the first at or after (block, generation) its newest version up to that generation. A block is found by
two trees, and its own checksum covers its write id: if the disk lost a part of one of the three, they disagree.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from weightserver.common.version import refusal
from weightserver.core.arrays import Int64Array
from weightserver.core.errors import DamagedBlockError, DamagedFileError, StorageError
from weightserver.core.versions import NEWEST, Version
from weightserver.storage.contents import COUNTED, Contents
from weightserver.storage.interface import DATABASES, Blocks
from weightserver.storage.page_cache import address, begin_reading, faults_from_disk

CONTENTS = b"contents"
"""Key, in LMDB's unnamed database, of the sums over all others."""
_BLOCK = struct.Struct(">Q")
_VERSION_KEY = struct.Struct(">QI")
_ID_BYTES = 8
_NO_ID = bytes(_ID_BYTES)
_FOREIGN = "another database's pages lie in its versions"
_FAULT_CHECK_BLOCKS = 16
"""Blocks that are looked up, but for the first, before it is looked whether they were in memory."""
_MOST_SPREAD = 1.35
"""Bytes of the file that are read at most for a byte of its blocks."""

if TYPE_CHECKING:
    Databases = dict[str, lmdb._Database]


def open_databases(
    environment: lmdb.Environment, directory: Path, txn: lmdb.Transaction | None = None, *, create: bool = False
) -> Databases:
    """Opens all databases. Raises StorageError if an earlier version of this program made them."""
    try:
        return {name: environment.open_db(name.encode(), txn, create=create) for name in DATABASES}
    except lmdb.NotFoundError:
        with environment.begin() as earlier, earlier.cursor() as cursor:
            if cursor.set_key(b"changes"):
                raise StorageError(f"{directory} {refusal('0.2 or earlier')}") from None
        raise


class LmdbTransaction:
    """A snapshot of LMDB's, or a change.

    Args:
        touch: reads blocks with these keys into memory, many at once.
        contents: as the last transaction left them; of a change only.
    """

    def __init__(
        self,
        directory: Path,
        txn: lmdb.Transaction[memoryview],
        databases: Databases,
        *,
        touch: Callable[[list[bytes]], None] = lambda keys: None,
        contents: Contents | None = None,
    ) -> None:
        self.directory = directory
        self._txn = txn
        self._databases = databases
        self._versions = txn.cursor(databases["versions"])
        self._blocks = txn.cursor(databases["blocks"])
        self._touch = touch
        self._contents = contents
        self.changed = False
        self.block_bytes = 0
        """Bytes of the blocks that were put."""

    def get(self, database: str, key: bytes) -> memoryview | None:
        return self._txn.get(key, db=self._databases[database])

    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]:
        for key, value in self._txn.cursor(self._databases[database]):
            yield bytes(key), value

    def look(self) -> None:
        """Reads the ends of every database. Raises lmdb.Error if one cannot be read."""
        for database in self._databases.values():
            with self._txn.cursor(database) as cursor:
                cursor.first()
                cursor.last()

    def disk_bytes(self) -> dict[str, int]:
        """Bytes of each database's pages."""
        stats = {name: self._txn.stat(database) for name, database in self._databases.items()}
        return {
            name: stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])
            for name, stat in stats.items()
        }

    def num_entries(self, database: str) -> int:
        return int(self._txn.stat(self._databases[database])["entries"])

    def check_contents(self) -> None:
        """See `Transaction.check_contents`."""
        contents = self._contents or Contents(bytes(self._txn.get(CONTENTS) or b""))
        lost = [name for name in COUNTED if not contents.agrees(name, self.items(name))]
        if lost:
            raise self._damaged(f"its {' and '.join(lost)} are not what transaction {contents.transaction} left")

    def _damaged(self, what: str) -> DamagedFileError:
        problem = f"writes are lost: {what}"
        return DamagedFileError(
            f"{self.directory}: data.mdb is damaged ({problem}): restore it from a backup", [problem]
        )

    # ---- blocks

    def versions(self, first: int = 0) -> Iterator[Version]:
        """See `Transaction.versions`. Meanwhile the transaction must change no version."""
        with self._txn.cursor(self._databases["versions"]) as cursor:
            if not cursor.set_range(_BLOCK.pack(first)):
                return
            for key, write_id in cursor.iternext():
                if len(key) != _VERSION_KEY.size or len(write_id) != _ID_BYTES:
                    raise self._damaged(_FOREIGN)
                block, inverted = _VERSION_KEY.unpack(key)
                yield Version(block, NEWEST - inverted, int.from_bytes(write_id, "little"))

    def content(self, version: Version) -> memoryview:
        """See `Transaction.content`."""
        return self._content(_BLOCK.pack(version.block) + version.write_id.to_bytes(_ID_BYTES, "little"))

    def newest_blocks(self, blocks: Int64Array, *, up_to: int = NEWEST) -> Blocks:
        """See `Transaction.newest_blocks`. Once one was not in memory, the others are read ahead."""
        keys, found = self._newest_keys(blocks.tolist(), up_to), list[memoryview | None]()
        seek, value = self._blocks.set_key, self._blocks.value
        end, faults = 1, faults_from_disk()
        while len(found) < len(keys):
            found += [
                None if not key else value() if seek(key) else self._content(key) for key in keys[len(found) : end]
            ]
            end += _FAULT_CHECK_BLOCKS
            if faults_from_disk() > faults:
                self._read_ahead(found[-1], [key for key in keys[len(found) :] if key])
                faults = faults_from_disk()
        write_ids = b"".join([key[_BLOCK.size :] if key else _NO_ID for key in keys])
        return Blocks(found, np.frombuffer(write_ids, "<u8"))

    def _read_ahead(self, known: memoryview | None, keys: list[bytes]) -> None:
        """Reads the blocks after a known one from the disk: all at once if they lie together in the file, as neighbours
        do, else in threads, because LMDB waits for each page that it uses."""
        last = self._content(keys[-1]) if keys else None
        if known and last and 0 < address(last) - address(known) < _MOST_SPREAD * len(last) * len(keys):
            begin_reading(known, last)
        else:
            self._touch(keys[:-1])

    def _newest_keys(self, blocks: list[int], up_to: int) -> list[bytes]:
        """The keys in `blocks` of the newest versions of a generation ≤ `up_to`; empty for blocks that have none."""
        seek, key, write_id = self._versions.set_range, self._versions.key, self._versions.value
        found, inverted = list[bytes](), (NEWEST - up_to).to_bytes(4)
        for prefix in map(_BLOCK.pack, blocks):
            version = bytes(key()) if seek(prefix + inverted) else b""
            if version and len(version) != _VERSION_KEY.size:
                raise self._damaged(_FOREIGN)
            found.append(prefix + write_id() if version.startswith(prefix) else b"")
        return found

    def _content(self, key: bytes) -> memoryview:
        if not self._blocks.set_key(key):
            raise DamagedBlockError(
                f"{self.directory}: block {_BLOCK.unpack_from(key)[0]} lacks what its last write stored: 'weightserver "
                "verify' shows which checkpoints still have it"
            )
        return self._blocks.value()

    # ---- changes

    def put(self, database: str, key: bytes, value: bytes | bytearray | memoryview) -> None:
        self._replace(database, key, value)

    def _replace(self, database: str, key: bytes, value: bytes | bytearray | memoryview) -> bytes:
        """Stores a value; returns the one that was there, empty if none was."""
        before = self._txn.replace(key, value, db=self._databases[database])
        self._changing.add(database, key, value)
        if before is None:
            return b""
        self._changing.remove(database, key, before)
        return bytes(before)

    def delete(self, database: str, key: bytes) -> None:
        if (before := self._txn.pop(key, self._databases[database])) is not None:
            self._changing.remove(database, key, before)

    def clear(self, database: str) -> None:
        if database in COUNTED:
            self._changing.clear(database)
        self._txn.drop(self._databases[database], delete=False)

    def put_block(self, version: Version, value: bytes | bytearray | memoryview) -> None:
        """See `Transaction.put_block`."""
        write_id, block = version.write_id.to_bytes(_ID_BYTES, "little"), _BLOCK.pack(version.block)
        if before := self._replace("versions", _version_key(version), write_id):
            self._delete_content(block + before)
        self.block_bytes += len(value)
        self._txn.put(block + write_id, value, db=self._databases["blocks"])

    def delete_block(self, version: Version) -> None:
        self.delete("versions", _version_key(version))
        self._delete_content(_BLOCK.pack(version.block) + version.write_id.to_bytes(_ID_BYTES, "little"))

    def _delete_content(self, key: bytes) -> None:
        if not self._txn.delete(key, db=self._databases["blocks"]):
            self._content(key)  # raises

    @property
    def _changing(self) -> Contents:
        assert self._contents is not None
        self.changed = True
        return self._contents


def _version_key(version: Version) -> bytes:
    return _VERSION_KEY.pack(version.block, NEWEST - version.generation)
