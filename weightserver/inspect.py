"""What a data directory holds, read beside a running shard or without one; nothing is written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from weightserver.storage import LmdbStorage, block_key_parts


def inspect_directory(directory: Path) -> dict[str, Any]:
    """Identity, spec, state, schedule and blocks of a shard, as plain values.

    Raises:
        StorageError: the directory holds no shard's data.
    """
    storage = LmdbStorage(directory, readonly=True)
    try:
        with storage.read() as txn:
            meta = {key.decode(): json.loads(bytes(value)) for key, value in txn.items("meta")}
            versions = Counter(block_key_parts(key)[1] for key, _ in txn.items("blocks"))
            horizon = sum(len(value) // 4 for _, value in txn.items("schedule"))
            writers = sum(1 for _ in txn.items("writers"))
        state = meta.get("state") or {}
        return {
            "directory": str(directory),
            **meta.get("identity", {}),
            "spec": meta.get("spec"),
            "run": state.get("run", ""),
            "epoch": state.get("epoch", 0),
            "clock": state.get("clock", 0),
            "horizon": horizon,
            "rows_stored": state.get("rows_stored", 0),
            "writers": writers,
            "disk_bytes": storage.disk_bytes(),
            "generation": state.get("generation", 0),
            "checkpoints": [kept["name"] for kept in state.get("checkpoints", ())],
            "blocks_by_generation": {str(generation): count for generation, count in sorted(versions.items())},
        }
    finally:
        storage.close()
