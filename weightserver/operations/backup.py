"""Backs up a checkpoint of running shards to files; `backup_files` describes them.

Meanwhile the shards keep the checkpoint under a second name, `backup-…`, so that training may continue and release the
first. The name stands for this machine and the directory: a backup that was killed starts over when its command is
repeated, and releases it first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from weightserver.protocol.codec import table_digest
from weightserver.storage.shard_builder import BATCH_BYTES

_log = logging.getLogger(__name__)
"""Numbers of blocks and their contents."""


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
        held_as = _held_name(directory)
        _release(client, held_as)  # kept by a backup that was killed
        client.copy_checkpoint(chosen, held_as)  # by its identity: another may take the name meanwhile
        try:
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
                    _copy_shard(_ShardReader(client, shard, held_as, info), new / f"shard-{shard}", chosen)
                    for shard in range(len(info.shards))
                ),
                table_identity=info.identity.hex(),
            )
        finally:
            _release(client, held_as)
        text = json.dumps({"format": FORMAT, "sha256": made.digest, "backup": asdict(made)}, indent=2) + "\n"
        atomic_write(new / MANIFEST, lambda path: path.write_text(text), mode=PRIVATE_FILE)
    return made


def _held_name(directory: Path) -> str:
    """The checkpoint's second name while it is copied from this machine to `directory`."""
    place = f"{socket.gethostname()}:{directory.resolve()}"
    return BACKUP_PREFIX + hashlib.sha256(place.encode()).hexdigest()[:8]


def _release(client: WeightClient, name: str) -> None:
    """Releases a checkpoint if a shard keeps it."""
    if name in client.describe().checkpoint_names:
        client.release(name)


def _kept(reader: _ShardReader, answer: pb.DescribeResponse, chosen: Checkpoint) -> pb.Checkpoint:
    """The chosen checkpoint as a shard keeps it.

    Raises:
        NoTableError: it does not, or a backup of the same name elsewhere has put another one in its place.
    """
    for kept in answer.checkpoints:
        if (kept.name, kept.identity) == (reader.checkpoint, chosen.checkpoint_id):
            return kept
    raise NoTableError(f"shard {reader.shard} no longer keeps the checkpoint: repeat the command")


def _copy_shard(reader: _ShardReader, directory: Path, chosen: Checkpoint) -> dict[str, Any]:
    """Writes a shard's files; returns the shard's entry in `Backup.shards`."""
    directory.mkdir(PRIVATE_DIRECTORY)
    answer, rates = reader.describe(), reader.client.learning_rates(shard=reader.shard)
    kept = _kept(reader, answer, chosen)
    files = dict[str, dict[str, Any]]()

    def write(name: str, columns: dict[str, Any]) -> None:
        path = directory / name
        atomic_write(path, partial(save_file, columns), mode=PRIVATE_FILE)
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}

    write(SCHEDULE, {"learning_rates": rates[: kept.clock]})
    rows_stored, named = 0, list[tuple[int, int]]()
    for blocks in reader.batches():
        number = np.array([block.number for block in blocks], np.int64)
        write_id = np.array([block.write_id for block in blocks], np.uint64)
        content = np.frombuffer(b"".join(block.content for block in blocks), np.uint8).reshape(len(blocks), -1)
        columns = {"number": number, "write_id": write_id, "content": content}
        write(f"blocks-{number[0]:015d}.safetensors", columns)
        rows_stored += sum(reader.codec.num_written(block.content) for block in blocks)
        named += zip(number.tolist(), write_id.tolist(), strict=True)
    end = reader.read_blocks(reader.info.spec.num_blocks)
    _kept(reader, reader.describe(), chosen)
    if rows_stored != kept.rows_stored:
        raise ClusterError(
            f"shard {reader.shard} sent {rows_stored} of the {kept.rows_stored} rows of the checkpoint: check its "
            "directory with 'weightserver verify'"
        )
    if digest(named) != end.digest:
        raise ClusterError(
            f"shard {reader.shard} sent other versions of blocks than it keeps of the checkpoint: check its directory "
            "with 'weightserver verify'"
        )
    _log.info(
        "shard %(shard)d: %(rows)d rows in %(files)d files",
        {"shard": reader.shard, "rows": rows_stored, "files": len(files)},
    )
    return {
        "clock": kept.clock,
        "rows_stored": rows_stored,
        "lineage": list(end.lineage),
        "files": files,
    }


@dataclass(frozen=True)
class _ShardReader:
    """Reads a checkpoint of one shard."""

    client: WeightClient
    shard: int
    checkpoint: str
    info: TableInfo

    @property
    def codec(self) -> BlockCodec:
        return BlockCodec(self.info.spec)

    def describe(self) -> pb.DescribeResponse:
        answer: pb.DescribeResponse = self.client.call_shard(self.shard, "Describe", pb.DescribeRequest())
        return answer

    def batches(self) -> Iterator[list[pb.Block]]:
        """The stored blocks, checked, in ascending order, enough for a file at a time."""
        codec, num_blocks = self.codec, self.info.spec.num_blocks
        blocks, first = list[pb.Block](), 0
        while first < num_blocks:
            answer = self.read_blocks(first)
            for block in answer.blocks:
                codec.check(block.number, block.write_id, block.content)
            blocks += answer.blocks
            first = answer.next_block or num_blocks
            if blocks and (first >= num_blocks or len(blocks) * codec.num_bytes >= BATCH_BYTES):
                yield blocks
                blocks = []

    def read_blocks(self, first_block: int) -> pb.ReadBlocksResponse:
        """Some blocks from a number on. After the last one, the digest of all of them and the marks up to the
        checkpoint."""
        table = table_digest(self.info.spec, self.info.identity)
        request = pb.ReadBlocksRequest(checkpoint=self.checkpoint, table=table, first_block=first_block)
        answer: pb.ReadBlocksResponse = self.client.call_shard(self.shard, "ReadBlocks", request)
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
