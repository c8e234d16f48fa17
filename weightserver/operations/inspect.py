"""Describes the contents of a data directory without writing to it or delaying a shard that serves it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weightserver.common.atomic_files import to_path
from weightserver.common.version import FORMAT
from weightserver.storage.records import State, read_horizon, read_identity, read_spec, read_state
from weightserver.storage.snapshot import Snapshot, read_snapshot


def inspect_directory(directory: Path) -> dict[str, Any]:
    """Returns a shard's identity, spec, state, schedule and number of blocks as plain values, without reading blocks.

    Raises:
        StorageError: the directory holds no shard's data, or the records read are damaged.
    """
    return read_snapshot(directory, _inspect)


def _inspect(snapshot: Snapshot) -> dict[str, Any]:
    identity = read_identity(snapshot)
    complete = identity is not None and not identity.unfinished
    spec, state = (read_spec(snapshot), read_state(snapshot)) if complete else (None, State())
    return {
        "directory": str(snapshot.directory),
        "format": FORMAT,
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


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=to_path, help="the --data-dir of a shard")


def run(arguments: argparse.Namespace) -> None:
    print(json.dumps(inspect_directory(arguments.directory), indent=2))
