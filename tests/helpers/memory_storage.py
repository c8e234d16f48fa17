"""A shard's storage in memory, with the guarantees of the real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weightserver.core.arrays import Int64Array
from weightserver.core.errors import StorageError
from weightserver.storage.interface import DATABASES, NEWEST, DiskUsage


class MemoryStorage:
    """Changes are atomic, snapshots immutable. A new `Shard` on it behaves as if restarted."""

    directory = Path("memory")

    def __init__(self) -> None:
        self._committed = MemoryTransaction({name: {} for name in DATABASES})
        self._on_disk = self._committed
        self.fails = self.fails_too_late = False
        """Whether the next commit fails, and whether its changes are nevertheless stored at the next start."""
        self.num_landed = 0
        """Number of transactions that the next start will find."""
        self._broken = False

    @property
    def contents(self) -> dict[str, dict[Any, bytes]]:
        """The data that the next start finds."""
        return self._on_disk.databases

    def copy(self) -> MemoryStorage:
        """A copy of the directory as stored on disk."""
        copied = MemoryStorage()
        copied._committed = copied._on_disk = self._on_disk
        return copied

    def restart(self) -> None:
        """Another process opens the directory."""
        self._committed = self._on_disk
        self.fails = self._broken = False

    @contextlib.contextmanager
    def read(self) -> Iterator[MemoryTransaction]:
        self._check()
        yield self._committed

    @contextlib.contextmanager
    def write(self) -> Iterator[MemoryTransaction]:
        self._check()
        changed = MemoryTransaction({name: dict(values) for name, values in self._committed.databases.items()})
        yield changed
        if not self.fails or self.fails_too_late:
            self._on_disk = changed
            self.num_landed += 1
        self._broken = self.fails
        self._check()
        self._committed = changed

    def _check(self) -> None:
        """Fails like LMDB, whose environment is unusable after a meta page could not be written."""
        if self._broken:
            raise StorageError(f"{self.directory}: cannot be written: Input/output error")

    def disk_bytes(self) -> int:
        return sum(self.disk_usage().databases.values())

    def disk_usage(self) -> DiskUsage:
        databases = {name: sum(map(len, values.values())) for name, values in self._committed.databases.items()}
        return DiskUsage(databases, free=0, volume_free=1 << 40, map_size=1 << 44)


class MemoryTransaction:
    """One dictionary per database; `blocks` by (block, generation)."""

    def __init__(self, databases: dict[str, dict[Any, bytes]]) -> None:
        self.directory = MemoryStorage.directory
        self.databases = databases
        self._blocks = databases["blocks"]
        self.changed = False

    def get(self, database: str, key: bytes) -> memoryview | None:
        value = self.databases[database].get(key)
        return None if value is None else memoryview(value)

    def put(self, database: str, key: bytes, value: bytes | bytearray) -> None:
        self.changed = True
        self.databases[database][key] = bytes(value)

    def delete(self, database: str, key: bytes) -> None:
        self.changed = True
        self.databases[database].pop(key, None)

    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]:
        for key, value in sorted(self.databases[database].items()):
            yield key, memoryview(value)

    def block_versions(self) -> Iterator[tuple[int, int]]:
        yield from sorted(self._blocks, key=lambda version: (version[0], -version[1]))

    def clear(self, database: str) -> None:
        self.changed = True
        self.databases[database].clear()

    def newest_block(self, block: int, *, up_to: int = NEWEST) -> memoryview | None:
        found = [generation for generation in self.generations(block) if generation <= up_to]
        return memoryview(self._blocks[block, found[0]]) if found else None

    def newest_blocks(self, blocks: Int64Array, *, up_to: int = NEWEST) -> list[memoryview | None]:
        return [self.newest_block(block, up_to=up_to) for block in blocks.tolist()]

    def next_block(self, first: int) -> int | None:
        return min((block for block, _ in self._blocks if block >= first), default=None)

    def generations(self, block: int) -> list[int]:
        return sorted((generation for known, generation in self._blocks if known == block), reverse=True)

    def is_changed(self, first: int) -> bool:
        return self.next_change(first, 0) is not None

    def next_change(self, generation: int, block: int) -> tuple[int, int] | None:
        changes = sorted((written, known) for known, written in self._blocks if written)
        return next((change for change in changes if change >= (generation, block)), None)

    def put_block(self, block: int, generation: int, value: bytes | bytearray | memoryview) -> None:
        self.changed = True
        self._blocks[block, generation] = bytes(value)

    def delete_block(self, block: int, generation: int) -> None:
        self.changed = True
        del self._blocks[block, generation]

    def delete_generations(self, first: int) -> None:
        for block, generation in list(self._blocks):
            if generation >= first:
                self.delete_block(block, generation)
