"""Backs up a checkpoint of running shards to files; `backup_files` describes them.

Meanwhile the shards keep the checkpoint under a second name, `backup-…`, so that training may continue and release the
first. A file beside the new directory notes the name: a backup that was killed starts over when its command is
repeated, and releases it first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from weightserver.client.client import WeightClient
from weightserver.client.results import TableInfo
from weightserver.common.atomic_files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    atomic_directory,
    atomic_write,
    sha256,
    to_path,
)
from weightserver.common.version import FORMAT, __version__
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import BACKUP_PREFIX, Checkpoint, chosen_checkpoint
from weightserver.core.errors import ClusterError, NoTableError
from weightserver.core.versions import digest
from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.operations.backup_files import MANIFEST, SCHEDULE, Backup
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import table_number

_FILE_BYTES = 64 << 20
"""Bytes of blocks after which a new file begins."""

_log = logging.getLogger(__name__)


def backup(client: WeightClient, directory: Path, *, checkpoint: str | None = None) -> Backup:
    """Copies a checkpoint that all shards keep, by default the newest, to a new or empty `directory`.

    The directory appears once it is complete.

    Raises:
        ValueError: the directory holds something.
        NoTableError: the checkpoint does not exist or was released.
        StorageError: a block is damaged.
        OSError: the disk is full, or another process writes to the directory.
    """
    with atomic_directory(directory, mode=PRIVATE_DIRECTORY) as new:
        chosen = chosen_checkpoint(checkpoint, client.checkpoints())
        client.join_newest_session()
        with _held(client, chosen, directory.resolve()) as held_as:
            info = client.describe()
            made = Backup(
                checkpoint=chosen.name,
                step=chosen.step,
                identity=chosen.checkpoint_id.hex(),
                run=info.run,
                epoch=info.epoch,
                spec=info.spec,
                version=__version__,
                created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                shards=tuple(
                    _copy_shard(client, shard, held_as, info, new / f"shard-{shard}")
                    for shard in range(len(info.shards))
                ),
                table_identity=info.identity.hex(),
            )
        text = json.dumps({"format": FORMAT, "sha256": made.digest, "backup": asdict(made)}, indent=2) + "\n"
        atomic_write(new / MANIFEST, lambda path: path.write_text(text), mode=PRIVATE_FILE)
    return made


@contextlib.contextmanager
def _held(client: WeightClient, chosen: Checkpoint, directory: Path) -> Iterator[str]:
    """Within the context, all shards keep the checkpoint under the name that it yields, which nobody else uses."""
    note = directory.with_name(f".{directory.name}.holds")
    if note.exists():
        _release(client, note.read_text())  # kept for a backup that was killed
    name = BACKUP_PREFIX + secrets.token_hex(4)
    atomic_write(note, lambda path: path.write_text(name))
    try:
        client.copy_checkpoint(chosen, name)  # by its identity: another may take its name meanwhile
        yield name
    finally:
        _release(client, name)
        note.unlink()


def _release(client: WeightClient, name: str) -> None:
    """Releases a checkpoint if a shard keeps it."""
    if name in client.describe().checkpoint_names:
        client.release(name)


def _copy_shard(client: WeightClient, shard: int, checkpoint: str, info: TableInfo, directory: Path) -> dict[str, Any]:
    """Writes a shard's files; returns the shard's entry in `Backup.shards`."""
    directory.mkdir(PRIVATE_DIRECTORY)
    codec, files = BlockCodec(info.spec), dict[str, dict[str, Any]]()
    described = client.call_shard(shard, "Describe", pb.DescribeRequest())
    kept = next((kept for kept in described.checkpoints if kept.name == checkpoint), None)
    if kept is None:
        raise NoTableError(f"shard {shard} no longer keeps the checkpoint: repeat the command")

    def write(name: str, columns: dict[str, Any]) -> None:
        path = directory / name
        atomic_write(path, partial(save_file, columns), mode=PRIVATE_FILE)
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}

    write(SCHEDULE, {"learning_rates": client.learning_rates(shard=shard)[: kept.step]})
    rows_stored, named = 0, list[tuple[int, int]]()
    for blocks in _batches(client, shard, checkpoint, info):
        for block in blocks:
            codec.check(block.number, block.write_id, block.content)
            rows_stored += codec.num_written(block.content)
            named.append((block.number, block.write_id))
        columns = {
            "number": np.array([block.number for block in blocks], np.int64),
            "write_id": np.array([block.write_id for block in blocks], np.uint64),
            "content": np.frombuffer(b"".join(block.content for block in blocks), np.uint8).reshape(len(blocks), -1),
        }
        write(f"blocks-{blocks[0].number:015d}.safetensors", columns)
    end = _read_blocks(client, shard, checkpoint, info, info.spec.num_blocks)
    problem = ""
    if rows_stored != kept.rows_stored:
        problem = f"{rows_stored} of the {kept.rows_stored} rows"
    elif digest(named) != end.digest:
        problem = "other versions of blocks than it keeps"
    if problem:
        raise ClusterError(
            f"shard {shard} sent {problem} of the checkpoint: check its directory with 'weightserver verify'"
        )
    _log.info(
        "shard %(shard)d: %(rows)d rows in %(files)d files", {"shard": shard, "rows": rows_stored, "files": len(files)}
    )
    return {"rows_stored": rows_stored, "lineage": list(end.lineage), "files": files}


def _batches(client: WeightClient, shard: int, checkpoint: str, info: TableInfo) -> Iterator[list[pb.Block]]:
    """A shard's blocks of the checkpoint in ascending order, enough for a file at a time."""
    blocks, first, num_bytes = list[pb.Block](), 0, BlockCodec(info.spec).num_bytes
    while first < info.spec.num_blocks:
        answer = _read_blocks(client, shard, checkpoint, info, first)
        blocks += answer.blocks
        first = answer.next_block or info.spec.num_blocks
        if blocks and (first >= info.spec.num_blocks or len(blocks) * num_bytes >= _FILE_BYTES):
            yield blocks
            blocks = []


def _read_blocks(
    client: WeightClient, shard: int, checkpoint: str, info: TableInfo, first_block: int
) -> pb.ReadBlocksResponse:
    """Some blocks from a number on. After the last one, the digest of all of them and the marks up to the
    checkpoint."""
    table = table_number(info.spec, info.identity)
    request = pb.ReadBlocksRequest(checkpoint=checkpoint, table=table, first_block=first_block)
    answer: pb.ReadBlocksResponse = client.call_shard(shard, "ReadBlocks", request)
    return answer


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--output", type=to_path, required=True, help="a new directory")
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
