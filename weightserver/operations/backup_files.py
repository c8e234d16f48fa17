"""The files of a backup: a checkpoint of all shards.

manifest.json           the table, the checkpoint, and the size and SHA-256 of every file; written last
shard-K/
  schedule.safetensors  learning_rates float32 [step of the checkpoint]
  blocks-N.safetensors  stored blocks from number N on: number int64 [n], write_id uint64 [n], content uint8
                        [n, block bytes], see `core.blocks`; rows never written are in no file

In a bucket, the names of the safetensors end in -X, which is random and the same for all of one command.

An increment has the blocks that were written since another backup beside it, its base, which its manifest names. It is
restored with its base, and the base of that, up to one that has all blocks.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from weightserver.common.version import FORMAT, refusal
from weightserver.core.arrays import Float32Array
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import Checkpoint
from weightserver.core.errors import StorageError
from weightserver.core.spec import TableSpec
from weightserver.core.versions import Version
from weightserver.operations.backup_places import MANIFEST, Place

SCHEDULE = "schedule.safetensors"


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
    """When it was made; of an increment, or with `keep`, after those beside it, even if a clock was ahead."""
    shards: tuple[dict[str, Any], ...]
    """Per shard: rows_stored (in its files), lineage (marks up to the checkpoint), digest (of all blocks of the
    checkpoint, see `core.versions`, hexadecimal), and files: name -> {bytes, sha256}."""
    table_identity: str
    """Hexadecimal."""
    base: str = ""
    """Name of the backup beside this one since which the blocks were written; empty if these are all."""
    base_sha256: str = ""
    """The SHA-256 of that backup's manifest; empty without a base."""

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

    @property
    def kept(self) -> Checkpoint:
        """The checkpoint."""
        return Checkpoint(self.checkpoint, self.step, bytes.fromhex(self.identity))


def read_backup(place: Place) -> Backup:
    """Reads the manifest of a backup.

    Raises:
        ValueError: the manifest is missing, damaged or of another format.
        OSError, ObjectStoreError: it cannot be read.
    """
    if (text := place.read(MANIFEST)) is None:
        raise ValueError(f"{place} holds no backup")
    try:
        stored = json.loads(text)
        if stored["format"] != FORMAT:
            raise ValueError(f"{place} {refusal(stored['format'])}")
        fields = stored["backup"]
        made = Backup(**fields | {"spec": TableSpec(**fields["spec"]), "shards": tuple(fields["shards"])})
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise _damaged(place, error) from None
    if made.digest != stored["sha256"]:
        raise _damaged(place, "checksum")
    return made


def _damaged(place: Place, problem: object) -> ValueError:
    """An error for a manifest that cannot be read; its fields may change until the format is released."""
    return ValueError(
        f"{place}/{MANIFEST} is damaged ({problem}), or was made by another commit before the release of {FORMAT}.0: "
        "use another backup"
    )


@dataclass(frozen=True)
class BackupReader:
    """Reads a backup together with those that it needs; newest first."""

    links: Sequence[tuple[Place, Backup]]

    @classmethod
    def of(cls, place: Place) -> BackupReader:
        """Raises ValueError if a manifest is missing, damaged, or that of another backup than the needed one."""
        links = [(place, read_backup(place))]
        while (made := links[-1][1]).base:
            base = place.beside(made.base)
            try:
                before = read_backup(base)
            except ValueError as error:
                raise ValueError(f"{place} needs its base {made.base}, but {error}") from None
            if before.digest != made.base_sha256:
                raise ValueError(f"{place} needs its base {made.base}, but {base} is another backup: use another one")
            links.append((base, before))
        return cls(links)

    @property
    def made(self) -> Backup:
        """The backup itself."""
        return self.links[0][1]

    def learning_rates(self, shard: int) -> Float32Array:
        """float32 [step of the checkpoint]. Raises as `blocks`."""
        place, made = self.links[0]
        (name,) = (name for name in made.shards[shard]["files"] if not _holds_blocks(name))
        rates: Float32Array = load(_read_file(place, made, shard, name))["learning_rates"]
        return rates

    def blocks(self, shard: int) -> Iterator[tuple[Version, bytes]]:
        """Yields a shard's blocks, checked, ascending, as versions of generation 0.

        Raises:
            StorageError: a file or a block is damaged or missing.
            OSError, ObjectStoreError: a file cannot be read.
        """
        codec, last = BlockCodec(self.made.spec), -1
        found = [_blocks(place, made, shard, codec) for place, made in self.links]
        for version, block in heapq.merge(*found, key=_number):  # of equal ones the newest backup's is first
            if version.block != last:
                last = version.block
                yield version, block


def _number(found: tuple[Version, bytes]) -> int:
    return found[0].block


def _holds_blocks(name: str) -> bool:
    return name.startswith("blocks-")


def _blocks(place: Place, made: Backup, shard: int, codec: BlockCodec) -> Iterator[tuple[Version, bytes]]:
    for name in sorted(filter(_holds_blocks, made.shards[shard]["files"])):  # in ascending order of their blocks
        yield from _blocks_in(_read_file(place, made, shard, name), f"{place}/shard-{shard}/{name}", codec)


def _blocks_in(content: bytes, path: str, codec: BlockCodec) -> Iterator[tuple[Version, bytes]]:
    try:
        columns = load(content)
        named = columns["number"].astype(np.int64).tolist(), columns["write_id"].astype(np.uint64).tolist()
        blocks = list(zip(*named, columns["content"], strict=True))
    except (SafetensorError, KeyError, ValueError) as error:
        raise StorageError(f"{path} is damaged ({error}): use another backup") from None
    del content, columns  # only the blocks stay in memory
    for number, write_id, values in blocks:
        block = values.tobytes()
        if problem := codec.problem(number, write_id, block):
            raise StorageError(f"{path}: {codec.name(number)} {problem}: use another backup")
        yield Version(number, 0, write_id), block


def _read_file(place: Place, made: Backup, shard: int, name: str) -> bytes:
    """Raises StorageError unless the file matches its entry in the manifest."""
    content = place.read(f"shard-{shard}/{name}")
    if content is None or hashlib.sha256(content).hexdigest() != made.shards[shard]["files"][name]["sha256"]:
        raise StorageError(f"{place}/shard-{shard}/{name} is damaged or missing: use another backup")
    return content
