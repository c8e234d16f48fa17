"""What a data directory holds, read beside a running shard or without one; nothing is written, nobody is held up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from weightserver.storage.records import State, read_format, read_horizon, read_identity, read_spec, read_state
from weightserver.storage.snapshot import Snapshot, read_snapshot


def inspect_directory(directory: Path) -> dict[str, Any]:
    """Identity, spec, state, schedule and numbers of blocks of a shard, as plain values. No block is read.

    Raises:
        StorageError: the directory holds no shard's data, or what is read of it is damaged.
    """
    return read_snapshot(directory, _inspect)


def _inspect(snapshot: Snapshot) -> dict[str, Any]:
    identity = read_identity(snapshot)
    filled = identity is not None and not identity.unfinished
    spec, state = (read_spec(snapshot), read_state(snapshot)) if filled else (None, State())
    return {
        "directory": str(snapshot.directory),
        "format": read_format(snapshot),
        **(asdict(identity) if identity else {}),
        "spec": spec and asdict(spec),
        "run": state.run,
        "epoch": state.epoch,
        "clock": state.clock,
        "horizon": read_horizon(snapshot, snapshot.num_entries("schedule")),
        "rows_stored": state.rows_stored,
        "writers": snapshot.num_entries("writers"),
        "disk_bytes": (snapshot.directory / "data.mdb").stat().st_blocks * 512,
        "generation": state.generation,
        "checkpoints": [kept.name for kept in state.checkpoints],
        "block_versions": snapshot.num_entries("blocks"),
    }
