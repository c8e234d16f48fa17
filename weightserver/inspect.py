"""What a data directory holds, read beside a running shard or without one; nothing is written."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weightserver.records import State, read_format, read_identity, read_records, read_schedule, read_spec, read_state
from weightserver.storage import LmdbStorage


def inspect_directory(directory: Path) -> dict[str, Any]:
    """Identity, spec, state, schedule and blocks of a shard, as plain values.

    Raises:
        StorageError: the directory holds no shard's data, or damaged data.
    """
    with closing(LmdbStorage(directory, readonly=True, beside=True, scattered=True)) as storage, storage.read() as txn:
        identity = read_identity(txn)
        filled = identity is not None and not identity.unfinished
        spec, state = (read_spec(txn), read_state(txn)) if filled else (None, State())
        versions = Counter(generation for _, generation in txn.block_versions())
        return {
            "directory": str(directory),
            "format": read_format(txn),
            **(asdict(identity) if identity else {}),
            "spec": spec and asdict(spec),
            "run": state.run,
            "epoch": state.epoch,
            "clock": state.clock,
            "horizon": len(read_schedule(txn)),
            "rows_stored": state.rows_stored,
            "writers": sum(1 for _ in read_records(txn, "writers")),
            "disk_bytes": storage.disk_bytes(),
            "generation": state.generation,
            "checkpoints": [kept.name for kept in state.checkpoints],
            "blocks_by_generation": {str(generation): count for generation, count in sorted(versions.items())},
        }
