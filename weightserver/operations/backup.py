"""Backups of a checkpoint of running shards, as a directory of files, and shards made from one.

    manifest.json           what the table is, which checkpoint, and the size and SHA-256 of every file; written last
    shard-K/
      schedule.safetensors  learning_rates float32 [horizon]
      blocks-A-B.safetensors
                            the stored blocks with A ≤ number < B: number int64 [n], content uint8 [n, block bytes],
                            byte by byte as blocks.py tells, with their checksums; rows nobody wrote are in none

All shards' rows are those of one checkpoint. While it is read it is kept under a second name, `backup-…`, so that
training may go on and release the first. A backup that was stopped goes on where it was: `unfinished.json`, the last to
go, says what it is of, and the blocks that are there already are checked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from weightserver.client.client import WeightClient
from weightserver.client.results import TableInfo
from weightserver.common.atomic_files import (
    LOCK,
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    atomic_write,
    directory_lock,
    require_empty,
    sha256,
)
from weightserver.common.version import __version__
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import BACKUP_PREFIX, Checkpoint, chosen_checkpoint
from weightserver.core.errors import ClusterError, NoTableError, StorageError
from weightserver.core.lineage import Lineage
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import table_digest
from weightserver.storage.records import earlier_identity
from weightserver.storage.shard_builder import BATCH_BYTES, ShardBuilder, TableState

_FORMAT = 1
_MANIFEST, _UNFINISHED, _SCHEDULE = "manifest.json", "unfinished.json", "schedule.safetensors"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Begun:
    """What `unfinished.json` tells of a backup; each field is that of `Backup`."""

    checkpoint: str
    step: int
    identity: str
    held_as: str


@dataclass(frozen=True)
class Backup:
    """What a backup is of, as its manifest tells."""

    checkpoint: str
    step: int
    identity: str
    """Of the call that took it, hexadecimal: the other shards' and the trainer's file know it by this."""
    run: str
    epoch: int
    spec: TableSpec
    held_as: str
    """The checkpoint's second name while the backup was made."""
    version: str
    """Of the software that made it."""
    created: str
    shards: tuple[dict[str, Any], ...]
    """For each its clock, schedule_version, rows_stored, lineage (marks, up to the checkpoint; not in a backup that
    version 0.1 made), and its files: name -> bytes, sha256."""
    table_identity: str = ""
    """Hexadecimal; empty in a backup that version 0.1 made."""

    @property
    def num_bytes(self) -> int:
        return sum(file["bytes"] for shard in self.shards for file in shard["files"].values())

    @property
    def rows_stored(self) -> int:
        return sum(shard["rows_stored"] for shard in self.shards)

    @property
    def digest(self) -> str:
        """SHA-256 of all that it says; what a backup of version 0.1 did not say is left out."""
        said = {name: value for name, value in asdict(self).items() if value or name != "table_identity"}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def backup(client: WeightClient, directory: Path, *, checkpoint: str | None = None) -> Backup:
    """Copies a checkpoint that all shards keep, the newest by default, to `directory`, which is new or holds one begun.

    Raises:
        ValueError: the directory holds something else.
        NoTableError: there is no such checkpoint, or no longer.
        StorageError: a block is damaged.
        OSError: the disk is full, or another process makes a backup there.
    """
    with directory_lock(directory, mode=PRIVATE_DIRECTORY):
        begun = _read_begun(directory, checkpoint)
        if not (directory / _MANIFEST).exists():
            begun = _hold(client, directory, begun, checkpoint)
            _copy(client, directory, begun)
        made = read_backup(directory)
        if begun is None:
            raise ValueError(f"{directory} holds a backup already, of {made.checkpoint!r}: give another directory")
        _release(client, made.held_as)
        (directory / _UNFINISHED).unlink()
        return made


def read_backup(directory: Path) -> Backup:
    """The manifest of a finished backup.

    Raises:
        ValueError: there is none, it is damaged, or of another format.
    """
    path = directory / _MANIFEST
    if not path.exists():
        what = "an unfinished backup: repeat its command" if (directory / _UNFINISHED).exists() else "no backup"
        raise ValueError(f"{directory} holds {what}")
    try:
        stored = json.loads(path.read_text())
        if stored["format"] != _FORMAT:
            raise ValueError(
                f"{directory} has format {stored['format']}, this version reads {_FORMAT}: use the one that made it"
            )
        fields = stored["backup"]
        made = Backup(**fields | {"spec": TableSpec(**fields["spec"]), "shards": tuple(fields["shards"])})
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): use another backup") from None
    if made.digest != stored["sha256"]:
        raise ValueError(f"{path} is damaged (checksum): use another backup")
    return made


def restore(directory: Path, data_dir: Path, *, shard: int, num_shards: int | None = None) -> Backup:
    """Makes the new directory `data_dir` of shard `shard` from a backup; one that was stopped goes on.

    The shard keeps the rows under the checkpoint's name too, so that `rollback` takes the others of its cluster there,
    and waits for a new session: nobody who wrote before goes on.

    Raises:
        ValueError: it is no such backup, or `data_dir` is not empty.
        StorageError: a file is damaged.
    """
    made = read_backup(directory)
    if num_shards not in (None, len(made.shards)):
        raise ValueError(
            f"{directory} is of {len(made.shards)} shards, not {num_shards}: restore all of them, then 'reshard'"
        )
    if not 0 <= shard < len(made.shards):
        raise ValueError(f"{directory} has shards 0..{len(made.shards) - 1}, not {shard}")
    source, copied = directory / f"shard-{shard}", made.shards[shard]
    files, pieces = copied["files"], _pieces(directory, made, shard)
    origin = {"backup": made.digest}
    with ShardBuilder(data_dir, shard=shard, num_shards=len(made.shards), origin=origin) as builder:
        if builder.finished:
            raise ValueError(f"{data_dir} was restored from {directory} before: serve it, or give another directory")
        codec = BlockCodec(made.spec)
        for _, end, path in pieces:
            if end > builder.next_block:
                _check_file(path, files[path.name])
                builder.add(_blocks(path, codec), next_block=end)
        _check_file(source / _SCHEDULE, files[_SCHEDULE])
        rates = load_file(source / _SCHEDULE)["learning_rates"]
        table = TableState(
            made.spec,
            rates,
            epoch=made.epoch,
            run=made.run,
            clock=copied["clock"],
            schedule_version=copied["schedule_version"] + 1,
            checkpoint=Checkpoint(made.checkpoint, made.step, bytes.fromhex(made.identity)),
            identity=bytes.fromhex(made.table_identity) or earlier_identity(asdict(made.spec)),
            timeline=made.identity,
            lineage=Lineage().joined(copied.get("lineage", ())),
        )
        builder.finish(table, rows_stored=copied["rows_stored"])
    return made


# ---- keeping the checkpoint meanwhile


def _read_begun(directory: Path, checkpoint: str | None) -> _Begun | None:
    """The backup that was begun in `directory`, if any was."""
    path = directory / _UNFINISHED
    if not path.exists():
        return None
    try:
        begun = _Begun(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(
            f"{path} is damaged: remove the directory and begin anew, and let go with 'weightserver release' what "
            f"'weightserver checkpoints' shows as {BACKUP_PREFIX}…"
        ) from None
    if checkpoint not in (None, begun.checkpoint):
        raise ValueError(f"{directory} holds a backup begun of {begun.checkpoint!r}: give another directory")
    return begun


def _hold(client: WeightClient, directory: Path, begun: _Begun | None, checkpoint: str | None) -> _Begun:
    """The backup begun in `directory`, or a new one there, whose checkpoint all shards keep now."""
    if begun is not None:
        if _is_kept(client, begun):
            return begun
        if any(directory.glob("shard-*/blocks-*")):
            raise NoTableError(
                f"the backup begun in {directory} cannot go on, its rows were rolled back or released: remove the "
                "directory and begin anew"
            )
        _release(client, begun.held_as)  # it was stopped between two shards
        checkpoint = begun.checkpoint
    else:
        require_empty(directory, but=frozenset({LOCK, f"{_UNFINISHED}.partial"}))
    chosen = chosen_checkpoint(checkpoint, client.checkpoints())
    client.join_newest_session()
    held_as = f"{BACKUP_PREFIX}{os.urandom(4).hex()}"
    begun = _Begun(chosen.name, chosen.step, chosen.checkpoint_id.hex(), held_as)
    _write_json(directory / _UNFINISHED, asdict(begun))
    client.copy_checkpoint(chosen, begun.held_as)  # and no other that takes its name meanwhile
    return begun


def _is_kept(client: WeightClient, begun: _Begun) -> bool:
    held = (begun.held_as, begun.identity)
    return any((kept.name, kept.checkpoint_id.hex()) == held for kept in client.checkpoints())


def _release(client: WeightClient, name: str) -> None:
    """Where any shard still keeps it."""
    if name in client.describe().checkpoint_names:
        client.join_newest_session()
        client.release(name)


# ---- the files


def _copy(client: WeightClient, directory: Path, begun: _Begun) -> None:
    """Copies what is not there yet, the manifest last."""
    info = client.describe()
    shards = []
    for shard in range(len(info.shards)):
        copied = _copy_shard(client, directory / f"shard-{shard}", shard, info, begun.held_as)
        shards.append(copied)
        _log.info("shard %d: %d rows in %d files", shard, copied["rows_stored"], len(copied["files"]))
    made = Backup(
        **asdict(begun),
        run=info.run,
        epoch=info.epoch,
        spec=info.spec,
        version=__version__,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        shards=tuple(shards),
        table_identity=info.identity.hex(),
    )
    for shard in range(len(shards)):
        _pieces(directory, made, shard)
    _write_json(directory / _MANIFEST, {"format": _FORMAT, "sha256": made.digest, "backup": asdict(made)})


def _copy_shard(client: WeightClient, directory: Path, shard: int, info: TableInfo, name: str) -> dict[str, Any]:
    """Copies what is not there yet, and tells of all: see `Backup.shards`."""
    directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
    answer = client.call_shard(shard, "Describe", pb.DescribeRequest())
    described = {kept.name: kept for kept in answer.checkpoints}
    if name not in described:
        raise NoTableError(f"shard {shard} keeps the checkpoint no longer: begin anew in another directory")
    kept = described[name]
    spec, codec = info.spec, BlockCodec(info.spec)
    request = pb.ReadBlocksRequest(checkpoint=name, table=table_digest(spec, info.identity))
    rates = client.learning_rates(shard=shard)
    atomic_write(directory / _SCHEDULE, lambda path: save_file({"learning_rates": rates}, path), mode=PRIVATE_FILE)
    pieces, rows_stored = _sound_pieces(directory, codec)
    first = pieces[-1][1] if pieces else 0
    while first < spec.num_blocks:
        blocks, end = _read_piece(client, shard, request, first, codec, spec.num_blocks)
        columns = {
            "number": np.array([block.number for block in blocks], np.int64),
            "content": np.frombuffer(b"".join(block.content for block in blocks), np.uint8).reshape(
                len(blocks), codec.num_bytes
            ),
        }
        path = directory / f"blocks-{first:015d}-{end:015d}.safetensors"
        atomic_write(path, partial(save_file, columns), mode=PRIVATE_FILE)
        pieces.append((first, end, path))
        rows_stored += sum(codec.num_written(block.content) for block in blocks)
        first = end
    if rows_stored != kept.rows_stored:
        raise ClusterError(f"shard {shard} sent {rows_stored} of the {kept.rows_stored} rows of {name!r}")
    request.first_block = spec.num_blocks
    behind = client.call_shard(shard, "ReadBlocks", request)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in [directory / _SCHEDULE, *(path for _, _, path in pieces)]
    }
    return {
        "clock": kept.clock,
        "schedule_version": answer.schedule_version,
        "rows_stored": rows_stored,
        "lineage": list(behind.lineage),
        "files": files,
    }


def _pieces(directory: Path, made: Backup, shard: int) -> list[tuple[int, int, Path]]:
    """(first block, end, path) of a shard's files of blocks, in order.

    Raises:
        StorageError: they are not all blocks of the table.
    """
    source, names = directory / f"shard-{shard}", made.shards[shard]["files"].keys() - {_SCHEDULE}
    pieces = _in_order(source, names)
    if len(pieces) < len(names) or (pieces[-1][1] if pieces else 0) != made.spec.num_blocks:
        raise StorageError(f"{source} lacks files: use another backup")
    return pieces


def _read_piece(
    client: WeightClient, shard: int, request: pb.ReadBlocksRequest, first: int, codec: BlockCodec, num_blocks: int
) -> tuple[list[pb.Block], int]:
    """Stored blocks from number `first` on, enough for a file, and the number that they end before.

    It is at most `num_blocks`, also where the table became larger since and the shard reads on, because the checkpoint,
    of version 0.1, does not tell how large it was.
    """
    blocks: list[pb.Block] = []
    while first < num_blocks and len(blocks) * codec.num_bytes < BATCH_BYTES:
        request.first_block = first
        answer = client.call_shard(shard, "ReadBlocks", request)
        for block in answer.blocks:
            codec.check(block.number, block.content)
        blocks += answer.blocks
        first = min(answer.next_block or num_blocks, num_blocks)
    return blocks, first


def _sound_pieces(directory: Path, codec: BlockCodec) -> tuple[list[tuple[int, int, Path]], int]:
    """The files of blocks that are there already, up to one that is missing or damaged, and how many rows they hold.
    What comes behind is removed."""
    there = {path.name for path in directory.glob("blocks-*")}
    sound, num_rows = [], 0
    for piece in _in_order(directory, [name for name in there if name.endswith(".safetensors")]):
        try:
            num_rows += sum(codec.num_written(content) for _, content in _blocks(piece[2], codec))
        except StorageError:
            _log.warning("%s is damaged: it is copied again, with all behind it", piece[2])
            break
        sound.append(piece)
    for name in there - {path.name for _, _, path in sound}:
        (directory / name).unlink()
    return sound, num_rows


def _in_order(directory: Path, names: Iterable[str]) -> list[tuple[int, int, Path]]:
    """(first block, end, path) of the files of blocks that follow one another from block 0 on."""
    pieces, expected = [], 0
    for name in sorted(names):
        first, end = map(int, name.removesuffix(".safetensors").split("-")[1:])
        if first != expected:
            break
        pieces.append((first, end, directory / name))
        expected = end
    return pieces


def _blocks(path: Path, codec: BlockCodec) -> Iterator[tuple[int, bytes]]:
    """The blocks of a file, checked."""
    try:
        columns = load_file(path)
        blocks = list(zip(columns["number"].astype(np.int64).tolist(), columns["content"], strict=True))
    except (SafetensorError, KeyError, ValueError) as error:
        raise StorageError(f"{path} is damaged ({error}): use another backup") from None
    for number, content in blocks:
        block = content.tobytes()
        if problem := codec.problem(number, block):
            raise StorageError(f"{path}: {codec.name(number)} {problem}: use another backup")
        yield number, block


def _check_file(path: Path, entry: dict[str, Any]) -> None:
    """Raises StorageError unless it is what the manifest says."""
    if not path.exists() or path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
        raise StorageError(f"{path} is damaged or missing: use another backup")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2) + "\n"
    atomic_write(path, lambda new: new.write_text(text), mode=PRIVATE_FILE)
