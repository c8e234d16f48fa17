"""The files of a backup: a checkpoint of all shards in a directory.

manifest.json           the table, the checkpoint, and the size and SHA-256 of every file; written last
shard-K/
  schedule.safetensors  learning_rates float32 [step of the checkpoint]
  blocks-N.safetensors  stored blocks from number N on: number int64 [n], write_id uint64 [n], content uint8
                        [n, block bytes], see `core.blocks`; rows never written are in no file
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from weightserver.common.atomic_files import sha256
from weightserver.common.version import FORMAT, refusal
from weightserver.core.blocks import BlockCodec
from weightserver.core.errors import StorageError
from weightserver.core.spec import TableSpec
from weightserver.core.versions import Version

MANIFEST, SCHEDULE = "manifest.json", "schedule.safetensors"


@dataclass(frozen=True)
class Backup:
    """The manifest of a backup; the names of the fields are part of the format."""

    checkpoint: str
    step: int
    identity: str
    """Hexadecimal id of the checkpoint, the same on every shard and in the trainer's file."""
    run: str
    epoch: int
    spec: TableSpec
    version: str
    """Version of the software that made the backup."""
    created: str
    shards: tuple[dict[str, Any], ...]
    """Per shard: rows_stored, lineage (marks up to the checkpoint), and files: name -> {bytes, sha256}."""
    table_identity: str
    """Hexadecimal."""

    @property
    def num_bytes(self) -> int:
        return sum(file["bytes"] for shard in self.shards for file in shard["files"].values())

    @property
    def rows_stored(self) -> int:
        return sum(shard["rows_stored"] for shard in self.shards)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def block_files(self, shard: int) -> list[str]:
        """Names of a shard's files of blocks, in ascending order of their blocks."""
        return sorted(self.shards[shard]["files"].keys() - {SCHEDULE})


def read_backup(directory: Path) -> Backup:
    """Reads the manifest of a backup.

    Raises:
        ValueError: the manifest is missing, damaged or of another format.
    """
    path = directory / MANIFEST
    if not path.exists():
        raise ValueError(f"{directory} holds no backup")
    try:
        stored = json.loads(path.read_text())
        if stored["format"] != FORMAT:
            raise ValueError(f"{directory} {refusal(stored['format'])}")
        fields = stored["backup"]
        made = Backup(**fields | {"spec": TableSpec(**fields["spec"]), "shards": tuple(fields["shards"])})
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): use another backup") from None
    if made.digest != stored["sha256"]:
        raise ValueError(f"{path} is damaged (checksum): use another backup")
    return made


def read_blocks(path: Path, codec: BlockCodec) -> Iterator[tuple[Version, bytes]]:
    """Yields the blocks in a file, checked, as versions of generation 0.

    Raises:
        StorageError: the file or a block is damaged.
    """
    try:
        columns = load_file(path)
        named = columns["number"].astype(np.int64).tolist(), columns["write_id"].astype(np.uint64).tolist()
        blocks = list(zip(*named, columns["content"], strict=True))
    except (SafetensorError, KeyError, ValueError) as error:
        raise StorageError(f"{path} is damaged ({error}): use another backup") from None
    for number, write_id, content in blocks:
        block = content.tobytes()
        if problem := codec.problem(number, write_id, block):
            raise StorageError(f"{path}: {codec.name(number)} {problem}: use another backup")
        yield Version(number, 0, write_id), block


def check_file(path: Path, entry: dict[str, Any]) -> None:
    """Raises StorageError unless the file matches its entry in the manifest."""
    if not path.exists() or path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
        raise StorageError(f"{path} is damaged or missing: use another backup")
