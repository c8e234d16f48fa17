"""The interface of a shard's storage: snapshots, atomic changes, and their sizes. `lmdb_storage` implements it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from weightserver.core.arrays import Int64Array, UInt64Array
from weightserver.core.versions import NEWEST, Version
from weightserver.storage.readers import OldReader

DATABASES = ("meta", "schedule", "writers", "versions", "blocks")


class Blocks(NamedTuple):
    """Stored blocks, and the writes that stored them."""

    contents: list[memoryview | None]
    """None for blocks that were never written."""
    write_ids: UInt64Array  # (n,); 0 for those


class Transaction(Protocol):
    """A snapshot of a shard's data, or one atomic change of it. Buffers are valid as long as it."""

    @property
    def directory(self) -> Path: ...
    @property
    def changed(self) -> bool:
        """Whether anything was put, cleared or deleted."""
        ...

    def get(self, database: str, key: bytes) -> memoryview | None: ...
    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]: ...
    def put(self, database: str, key: bytes, value: bytes | bytearray) -> None: ...
    def delete(self, database: str, key: bytes) -> None: ...
    def clear(self, database: str) -> None: ...

    def check_contents(self) -> None:
        """Raises DamagedFileError unless all records and versions are those that the last transaction left. Reads them
        all, but no block."""
        ...

    def versions(self, first: int = 0) -> Iterator[Version]:
        """All stored versions of blocks from number `first` on, in the order of blocks, a block's newest first."""
        ...

    def content(self, version: Version) -> memoryview:
        """A block's content. Raises DamagedBlockError if it is not there."""
        ...

    def newest_blocks(self, blocks: Int64Array, *, up_to: int = NEWEST) -> Blocks:
        """The newest versions of a generation ≤ `up_to` of these blocks, int64 [n]. Raises as `content`."""
        ...

    def put_block(self, version: Version, value: bytes | bytearray | memoryview) -> None:
        """Stores a version of a block, in place of that of the same generation if there is one."""
        ...

    def delete_block(self, version: Version) -> None: ...


@dataclass(frozen=True)
class DiskUsage:
    """The use of a data file, and the free space of its volume."""

    databases: dict[str, int]
    """Bytes of each database's pages."""
    free: int
    """Bytes of pages that later writes reuse, and of LMDB's own pages."""
    volume_free: int
    map_size: int
    """Bytes that the data file can grow to."""
    reader: OldReader = field(default_factory=OldReader)


class Storage(Protocol):
    """The storage of a shard's data."""

    directory: Path

    def read(self) -> AbstractContextManager[Transaction]: ...
    def write(self) -> AbstractContextManager[Transaction]: ...
    def disk_bytes(self) -> int: ...
    def disk_usage(self) -> DiskUsage: ...
    def look_at_readers(self) -> None:
        """Frees the snapshots of processes that died while they read, for which the file would grow, and notes since
        when others are there. To be called once in a while."""
        ...
