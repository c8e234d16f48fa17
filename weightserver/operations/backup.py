"""Backs up a checkpoint of running shards to files; `backup_files` describes them.

While the backup is in progress the shards keep the checkpoint under a second name, `backup-…`, so that training may
continue and release the first. Repeating an interrupted backup resumes it: `unfinished.json` names its checkpoint, and
the blocks already copied are checked again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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
    to_path,
)
from weightserver.common.version import FORMAT, __version__
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import BACKUP_PREFIX, chosen_checkpoint
from weightserver.core.errors import ClusterError, NoTableError, StorageError
from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.operations.backup_files import (
    MANIFEST,
    SCHEDULE,
    UNFINISHED,
    Backup,
    BlockFile,
    block_files,
    consecutive,
    read_backup,
    read_blocks,
)
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import table_digest
from weightserver.storage.shard_builder import BATCH_BYTES

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Begun:
    """The contents of `unfinished.json`; the fields are those of `Backup`."""

    checkpoint: str
    step: int
    identity: str
    held_as: str


def backup(client: WeightClient, directory: Path, *, checkpoint: str | None = None) -> Backup:
    """Copies a checkpoint that all shards keep, by default the newest, to `directory`: a new one, or one with an
    interrupted backup, which is resumed.

    Raises:
        ValueError: the directory holds something else.
        NoTableError: the checkpoint does not exist or was released.
        StorageError: a block is damaged.
        OSError: the disk is full, or another process writes to the directory.
    """
    with directory_lock(directory, mode=PRIVATE_DIRECTORY):
        begun = _read_begun(directory, checkpoint)
        if not (directory / MANIFEST).exists():
            begun = _hold(client, directory, begun, checkpoint)
            _copy(client, directory, begun)
        made = read_backup(directory)
        if begun is None:
            raise ValueError(f"{directory} already holds a backup of {made.checkpoint!r}: give another directory")
        _release(client, made.held_as)
        (directory / UNFINISHED).unlink()
        return made


# ---- keeping the checkpoint during the backup


def _read_begun(directory: Path, checkpoint: str | None) -> _Begun | None:
    """Reads the interrupted backup in `directory`, if there is one."""
    path = directory / UNFINISHED
    if not path.exists():
        return None
    try:
        begun = _Begun(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(
            f"{path} is damaged: remove the directory, start again, and remove the {BACKUP_PREFIX}… "
            "checkpoints that 'weightserver checkpoints' lists with 'weightserver release'"
        ) from None
    if checkpoint not in (None, begun.checkpoint):
        raise ValueError(f"{directory} holds an unfinished backup of {begun.checkpoint!r}: give another directory")
    return begun


def _hold(client: WeightClient, directory: Path, begun: _Begun | None, checkpoint: str | None) -> _Begun:
    """Resumes the backup `begun`, or begins a new one; all shards keep its checkpoint afterwards."""
    if begun is not None:
        if _is_kept(client, begun):
            return begun
        if any(directory.glob("shard-*/blocks-*")):
            raise NoTableError(
                f"the backup begun in {directory} cannot be resumed because its rows were rolled back or released: "
                "remove the directory and start again"
            )
        _release(client, begun.held_as)  # interrupted between two shards
        checkpoint = begun.checkpoint
    else:
        require_empty(directory, but=frozenset({LOCK, f"{UNFINISHED}.partial"}))
    chosen = chosen_checkpoint(checkpoint, client.checkpoints())
    client.join_newest_session()
    held_as = f"{BACKUP_PREFIX}{os.urandom(4).hex()}"
    begun = _Begun(chosen.name, chosen.step, chosen.checkpoint_id.hex(), held_as)
    _write_json(directory / UNFINISHED, asdict(begun))
    client.copy_checkpoint(chosen, begun.held_as)  # by its identity: another may take the name meanwhile
    return begun


def _is_kept(client: WeightClient, begun: _Begun) -> bool:
    held = (begun.held_as, begun.identity)
    return any((kept.name, kept.checkpoint_id.hex()) == held for kept in client.checkpoints())


def _release(client: WeightClient, name: str) -> None:
    """Releases a checkpoint if a shard still keeps it."""
    if name in client.describe().checkpoint_names:
        client.join_newest_session()
        client.release(name)


# ---- the files


def _copy(client: WeightClient, directory: Path, begun: _Begun) -> None:
    """Copies the missing files, and writes the manifest last."""
    info = client.describe()
    shards = []
    for shard in range(len(info.shards)):
        copied = _copy_shard(client, directory / f"shard-{shard}", shard, info, begun.held_as)
        shards.append(copied)
        _log.info(
            "shard %(shard)d: %(rows)d rows in %(files)d files",
            {"shard": shard, "rows": copied["rows_stored"], "files": len(copied["files"])},
        )
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
        block_files(directory, made, shard)  # raises if a file is missing
    _write_json(directory / MANIFEST, {"format": FORMAT, "sha256": made.digest, "backup": asdict(made)})


def _copy_shard(client: WeightClient, directory: Path, shard: int, info: TableInfo, name: str) -> dict[str, Any]:
    """Copies a shard's missing files; returns the shard's entry in `Backup.shards`."""
    directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
    answer = client.call_shard(shard, "Describe", pb.DescribeRequest())
    described = {kept.name: kept for kept in answer.checkpoints}
    if name not in described:
        raise NoTableError(f"shard {shard} no longer keeps the checkpoint: start again in another directory")
    kept = described[name]
    rates = client.learning_rates(shard=shard)
    atomic_write(directory / SCHEDULE, lambda path: save_file({"learning_rates": rates}, path), mode=PRIVATE_FILE)
    source = _BlockSource(client, shard, name, info)
    paths, rows_stored = _copy_blocks(source, directory)
    if rows_stored != kept.rows_stored:
        raise ClusterError(
            f"shard {shard} sent {rows_stored} of the {kept.rows_stored} rows of {name!r}: check its directory with "
            "'weightserver verify', then start again in another directory"
        )
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in [directory / SCHEDULE, *paths]
    }
    return {
        "clock": kept.clock,
        "schedule_version": answer.schedule_version,
        "rows_stored": rows_stored,
        "lineage": source.lineage(),
        "files": files,
    }


def _copy_blocks(source: _BlockSource, directory: Path) -> tuple[list[Path], int]:
    """Writes the missing files of blocks; returns the paths of all, and the number of rows in them."""
    codec, num_blocks = source.codec, source.info.spec.num_blocks
    files, rows_stored = _intact_files(directory, codec)
    first = files[-1].end if files else 0
    while first < num_blocks:
        blocks, end = source.read(first)
        content = np.frombuffer(b"".join(block for _, block in blocks), np.uint8)
        columns = {
            "number": np.array([number for number, _ in blocks], np.int64),
            "content": content.reshape(len(blocks), codec.num_bytes),
        }
        path = directory / f"blocks-{first:015d}-{end:015d}.safetensors"
        atomic_write(path, partial(save_file, columns), mode=PRIVATE_FILE)
        files.append(BlockFile(first, end, path))
        rows_stored += sum(codec.num_written(block) for _, block in blocks)
        first = end
    return [file.path for file in files], rows_stored


@dataclass(frozen=True)
class _BlockSource:
    """The stored blocks of a checkpoint of one shard."""

    client: WeightClient
    shard: int
    checkpoint: str
    info: TableInfo

    @property
    def codec(self) -> BlockCodec:
        return BlockCodec(self.info.spec)

    def read(self, first: int) -> tuple[list[tuple[int, bytearray]], int]:
        """Blocks from number `first` in their present form, enough for a file, and the end of their numbers.

        The end is at most the table's number of blocks.
        """
        codec, num_blocks = self.codec, self.info.spec.num_blocks
        blocks = list[tuple[int, bytearray]]()
        while first < num_blocks and len(blocks) * codec.num_bytes < BATCH_BYTES:
            answer = self._call(first)
            blocks += [(block.number, codec.renewed(block.number, block.content)) for block in answer.blocks]
            first = min(answer.next_block or num_blocks, num_blocks)
        return blocks, first

    def lineage(self) -> list[str]:
        """The shard's marks up to the checkpoint, which it sends after the last block."""
        return list(self._call(self.info.spec.num_blocks).lineage)

    def _call(self, first_block: int) -> pb.ReadBlocksResponse:
        table = table_digest(self.info.spec, self.info.identity)
        request = pb.ReadBlocksRequest(checkpoint=self.checkpoint, table=table, first_block=first_block)
        answer: pb.ReadBlocksResponse = self.client.call_shard(self.shard, "ReadBlocks", request)
        return answer


def _intact_files(directory: Path, codec: BlockCodec) -> tuple[list[BlockFile], int]:
    """The existing files of blocks up to the first that is missing or damaged, and the number of rows in them.

    Removes all later files.
    """
    existing = {path.name for path in directory.glob("blocks-*")}
    intact, num_rows = list[BlockFile](), 0
    for file in consecutive(directory, [name for name in existing if name.endswith(".safetensors")]):
        try:
            num_rows += sum(codec.num_written(content) for _, content in read_blocks(file.path, codec))
        except StorageError:
            _log.warning("%(path)s is damaged: copying it and all later files again", {"path": str(file.path)})
            break
        intact.append(file)
    for name in existing - {file.path.name for file in intact}:
        (directory / name).unlink()
    return intact, num_rows


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2) + "\n"
    atomic_write(path, lambda new: new.write_text(text), mode=PRIVATE_FILE)


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument(
        "--output", type=to_path, required=True, help="a new directory, or that of an interrupted backup"
    )
    parser.add_argument(
        "--checkpoint", type=non_empty_name, help="the checkpoint's name (default the newest that all shards keep)"
    )


def run(arguments: argparse.Namespace) -> None:
    with connect(arguments) as client:
        made = backup(client, arguments.output, checkpoint=arguments.checkpoint)
    print(
        f"backed up {made.rows_stored} rows of checkpoint {made.checkpoint} (step {made.step}) of {len(made.shards)} "
        f"shards, {made.num_bytes} bytes, to {arguments.output}"
    )
