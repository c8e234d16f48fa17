"""Describes the contents of a data directory without writing to it or delaying a shard that serves it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weightserver.common.atomic_files import to_path
from weightserver.common.version import FORMAT
from weightserver.core.errors import StorageError
from weightserver.storage.directory import data_file, noted_reader
from weightserver.storage.lmdb_transaction import LmdbTransaction
from weightserver.storage.records import State, read_identity, read_state, read_table
from weightserver.storage.snapshot import read_snapshot

_ATTEMPTS = 20


def inspect_directory(directory: Path) -> dict[str, Any]:
    """Returns a shard's identity, spec, state, schedule and number of blocks as plain values, without reading blocks.

    Another process reads them, which LMDB may end if the shard writes meanwhile; then a further one tries.

    Raises:
        StorageError: the directory holds no shard's data, the records read are damaged, or the shard writes faster than
            they can be read.
    """
    command = [sys.executable, "-m", "weightserver.operations.inspect", str(directory)]
    for _ in range(_ATTEMPTS):
        changed = _last_change(directory)
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout)
            if "error" in found:
                raise StorageError(found["error"])
            return found
        if changed == _last_change(directory):
            break
    reason = done.stderr.strip().rpartition("\n")[2] or f"its reader ended with status {done.returncode}"
    raise StorageError(f"{directory} cannot be read ({reason}): run 'weightserver verify' once it is stopped")


def _last_change(directory: Path) -> int:
    data = data_file(directory)
    return data.stat().st_mtime_ns if data.exists() else 0


def _main(directory: Path) -> None:
    """What the other process does."""
    try:
        found = read_snapshot(directory, _inspect)
        found["reader"] = noted_reader(directory)
    except StorageError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


def _inspect(snapshot: LmdbTransaction) -> dict[str, Any]:
    identity = read_identity(snapshot)
    complete = identity is not None and not identity.unfinished
    table, state = (read_table(snapshot), read_state(snapshot)) if complete else (None, State())
    return {
        "directory": str(snapshot.directory),
        "format": FORMAT,
        **(asdict(identity) if identity else {}),
        "spec": table and asdict(table[0]),
        "run": state.run,
        "epoch": state.epoch,
        "clock": state.clock,
        "rows_stored": state.rows_stored,
        "writers": snapshot.num_entries("writers"),
        "disk_bytes": (snapshot.directory / "data.mdb").stat().st_blocks * 512,
        "generation": state.generation,
        "checkpoints": [kept.name for kept in state.checkpoints],
        "block_versions": snapshot.num_entries("versions"),
    }


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=to_path, help="the --data-dir of a shard")


def run(arguments: argparse.Namespace) -> None:
    print(json.dumps(inspect_directory(arguments.directory), indent=2))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
