"""The interface of a shard's storage: snapshots, atomic changes, and their sizes. `lmdb_storage` implements it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weightserver.core.arrays import Int64Array

DATABASES = ("meta", "schedule", "writers", "blocks", "changes")
NEWEST = 2**32 - 1
"""The highest generation."""


class Reader(Protocol):
    """A snapshot of what a shard stores besides its blocks. Buffers are valid as long as the snapshot."""

    @property
    def directory(self) -> Path: ...
    def get(self, database: str, key: bytes) -> memoryview | None: ...
    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]: ...


class Transaction(Reader, Protocol):
    """A snapshot of a shard's data, or one atomic change of it."""

    @property
    def changed(self) -> bool:
        """Whether anything was put, cleared or deleted."""
        ...

    def put(self, database: str, key: bytes, value: bytes | bytearray) -> None: ...
    def delete(self, database: str, key: bytes) -> None: ...
    def block_versions(self) -> Iterator[tuple[int, int]]: ...
    def clear(self, database: str) -> None: ...
    def newest_block(self, block: int, *, up_to: int = NEWEST) -> memoryview | None: ...
    def newest_blocks(self, blocks: Int64Array, *, up_to: int = NEWEST) -> list[memoryview | None]: ...
    def next_block(self, first: int) -> int | None: ...
    def generations(self, block: int) -> list[int]: ...
    def is_changed(self, first: int) -> bool: ...
    def next_change(self, generation: int, block: int) -> tuple[int, int] | None: ...
    def put_block(self, block: int, generation: int, value: bytes | bytearray | memoryview) -> None: ...
    def delete_block(self, block: int, generation: int) -> None: ...
    def delete_generations(self, first: int) -> None: ...


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


class Storage(Protocol):
    """The storage of a shard's data."""

    directory: Path

    def read(self) -> AbstractContextManager[Transaction]: ...
    def write(self) -> AbstractContextManager[Transaction]: ...
    def disk_bytes(self) -> int: ...
    def disk_usage(self) -> DiskUsage: ...
