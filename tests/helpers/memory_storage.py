"""A shard's storage in memory, with the guarantees of the real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weightserver.core.arrays import Int64Array
from weightserver.core.versions import NEWEST, Version
from weightserver.storage.interface import DATABASES, Blocks, DiskUsage


class MemoryStorage:
    """Changes are atomic, snapshots immutable. A new `Shard` on it behaves as if restarted."""

    directory = Path("memory")

    def __init__(self) -> None:
        self._committed = MemoryTransaction({name: {} for name in DATABASES})

    @property
    def contents(self) -> dict[str, dict[Any, Any]]:
        return self._committed.databases

    @contextlib.contextmanager
    def read(self) -> Iterator[MemoryTransaction]:
        yield self._committed

    @contextlib.contextmanager
    def write(self) -> Iterator[MemoryTransaction]:
        changed = MemoryTransaction({name: dict(values) for name, values in self._committed.databases.items()})
        yield changed
        self._committed = changed

    def disk_bytes(self) -> int:
        return sum(self.disk_usage().databases.values())

    def look_at_readers(self) -> None:
        pass

    def disk_usage(self) -> DiskUsage:
        databases = {
            name: 8 * len(values) if name == "versions" else sum(map(len, values.values()))
            for name, values in self._committed.databases.items()
        }
        return DiskUsage(databases, free=0, volume_free=1 << 40, map_size=1 << 44)


class MemoryTransaction:
    """One dictionary per database: `versions` from (block, generation) to write id, `blocks` by (block, write id)."""

    def __init__(self, databases: dict[str, dict[Any, Any]]) -> None:
        self.directory = MemoryStorage.directory
        self.databases = databases
        self._versions, self._blocks = databases["versions"], databases["blocks"]
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

    def clear(self, database: str) -> None:
        self.changed = True
        self.databases[database].clear()

    def check_contents(self) -> None:
        pass

    def versions(self, first: int = 0) -> Iterator[Version]:
        found = [Version(key[0], key[1], write_id) for key, write_id in self._versions.items() if key[0] >= first]
        yield from sorted(found, key=lambda version: (version.block, -version.generation))

    def content(self, version: Version) -> memoryview:
        return memoryview(self._blocks[version.block, version.write_id])

    def newest_blocks(self, blocks: Int64Array, *, up_to: int = NEWEST) -> Blocks:
        generations = dict[int, int]()
        for block, generation in self._versions:
            if generation <= up_to:
                generations[block] = max(generation, generations.get(block, 0))
        found = [
            Version(block, generations[block], self._versions[block, generations[block]])
            if block in generations
            else None
            for block in blocks.tolist()
        ]
        write_ids = np.array([version.write_id if version else 0 for version in found], np.uint64)
        return Blocks([self.content(version) if version else None for version in found], write_ids)

    def put_block(self, version: Version, value: bytes | bytearray | memoryview) -> None:
        self.changed = True
        block, generation, write_id = version
        self._blocks.pop((block, self._versions.get((block, generation))), None)
        self._versions[block, generation] = write_id
        self._blocks[block, write_id] = bytes(value)

    def delete_block(self, version: Version) -> None:
        self.changed = True
        del self._versions[version.block, version.generation]
        del self._blocks[version.block, version.write_id]
