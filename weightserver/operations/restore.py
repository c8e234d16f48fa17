"""Creates a shard's directory from a backup."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from weightserver.common.atomic_files import to_path
from weightserver.common.object_store import to_location
from weightserver.core.blocks import BlockCodec
from weightserver.core.errors import StorageError
from weightserver.core.lineage import Lineage
from weightserver.core.versions import digest
from weightserver.operations.backup_files import Backup, BackupReader
from weightserver.operations.backup_places import place_at
from weightserver.storage.shard_builder import ShardBuilder, TableState


def restore(directory: Path, data_dir: Path, *, shard: int, num_shards: int | None = None) -> tuple[Backup, int]:
    """Creates the new directory `data_dir` of shard `shard` from a backup; an interrupted call may be repeated. Returns
    the backup's manifest and the number of restored rows.

    The shard keeps the rows as a checkpoint of the backed-up name, and as the other shards keep them for the backup, so
    that `rollback` can return these to them. It fences off all former writers until a new session is opened.

    Raises:
        ValueError: the directory holds no backup of that many shards, a backup that this one needs is not beside it, or
            `data_dir` is not empty.
        StorageError: a file is damaged.
    """
    place = place_at(directory)
    reader = BackupReader.of(place)
    made = reader.made
    if num_shards not in (None, len(made.shards)):
        raise ValueError(
            f"{place} is of {len(made.shards)} shards, not {num_shards}: restore all of them, then 'reshard'"
        )
    if not 0 <= shard < len(made.shards):
        raise ValueError(f"{place} has shards 0..{len(made.shards) - 1}, not {shard}")
    with ShardBuilder(data_dir, shard=shard, num_shards=len(made.shards), origin={"backup": made.digest}) as builder:
        if builder.finished:
            raise ValueError(f"{data_dir} was already restored from {place}: serve it, or give another directory")
        codec, num_rows = BlockCodec(made.spec), 0

        def added() -> Iterator[tuple[int, int]]:
            nonlocal num_rows
            for version, content in reader.blocks(shard):
                builder.add(version, content)
                num_rows += codec.num_written(content)
                yield version.block, version.write_id

        if digest(added()).hex() != made.shards[shard].get("digest"):
            raise StorageError(f"{place} has other blocks of shard {shard} than it had: use another backup")
        table = TableState(
            made.spec,
            reader.learning_rates(shard),
            epoch=made.epoch,
            run=made.run,
            checkpoint=made.kept,
            identity=bytes.fromhex(made.table_identity),
            lineage=Lineage().joined(made.shards[shard]["lineage"]),
            is_backed_up=True,
        )
        builder.finish(table, rows_stored=num_rows)
    return made, num_rows


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backup", type=to_location, help="the --output of a backup")
    parser.add_argument("--data-dir", type=to_path, required=True, help="the shard's new directory, on a local disk")
    parser.add_argument("--shard", type=int, required=True, help="number of the shard, from 0")
    parser.add_argument("--num-shards", type=int, help="shards in the cluster (default as many as were backed up)")


def run(arguments: argparse.Namespace) -> None:
    made, num_rows = restore(
        arguments.backup, arguments.data_dir, shard=arguments.shard, num_shards=arguments.num_shards
    )
    print(
        f"restored {num_rows} rows of shard {arguments.shard} of {len(made.shards)} "
        f"to {arguments.data_dir}: checkpoint {made.checkpoint} (step {made.step})"
    )
