"""Backs up a checkpoint of running shards to files; `backup_files` describes them.

The shards keep the checkpoint under a second name, `backup-…`, so that training may continue and release the first.
They keep it until a backup of a later checkpoint has ended: a shard that is lost until then can be restored from the
backup, and the others rolled back to the same state. What a failed or killed backup left is released at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
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
from weightserver.core.checkpoints import Checkpoint, backup_name, chosen_checkpoint
from weightserver.core.errors import NoTableError
from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.operations.backup_files import MANIFEST, SCHEDULE, Backup
from weightserver.operations.checkpoint_blocks import CheckpointReader

_FILE_BYTES = 64 << 20
"""Bytes of blocks in a file, if that is at least one block."""
_SHARDS_AT_ONCE = 8
"""Shards that are copied at the same time, each through a few times the memory of a file."""

_log = logging.getLogger(__name__)


def backup(client: WeightClient, directory: Path, *, checkpoint: str | None = None) -> Backup:
    """Copies a checkpoint that all shards keep, by default the newest, to a new or empty `directory`.

    The directory appears once it is complete. From then on the shards keep this checkpoint for backups, and no earlier
    one. Ctrl-C while it copies closes the client.

    Raises:
        ValueError: the directory holds something.
        NoTableError: the checkpoint does not exist or was released, by a backup of a later one too.
        StorageError: a block is damaged.
        ClusterError: a shard sent other blocks than it keeps.
        OSError: the disk is full, or another process writes to the directory.
    """
    with atomic_directory(directory, mode=PRIVATE_DIRECTORY) as new:
        chosen = chosen_checkpoint(checkpoint, client.checkpoints())
        client.join_newest_session()
        held = replace(chosen, name=backup_name(chosen))
        client.copy_checkpoint(chosen, held.name)  # by its identity: another may take its name meanwhile
        info = client.describe()
        try:
            shards = _copy_shards(client, held, info, new)
        except NoTableError as error:
            raise NoTableError(
                f"what the shards kept of checkpoint {chosen.name!r} for this backup was released while it was copied, "
                "by another backup, of a later one, that has ended, or by hand: repeat the command"
            ) from error
        made = Backup(
            checkpoint=chosen.name,
            step=chosen.step,
            identity=chosen.checkpoint_id.hex(),
            run=info.run,
            epoch=info.epoch,
            spec=info.spec,
            version=__version__,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            shards=shards,
            table_identity=info.identity.hex(),
        )
        text = json.dumps({"format": FORMAT, "sha256": made.digest, "backup": asdict(made)}, indent=2) + "\n"
        atomic_write(new / MANIFEST, lambda path: path.write_text(text), mode=PRIVATE_FILE)
    _release_earlier(client, chosen)
    return made


def _release_earlier(client: WeightClient, backed_up: Checkpoint) -> None:
    """Releases what the shards keep for backups of earlier checkpoints, failed and killed ones among them."""
    client.join_newest_session()  # another than at the beginning if the trainer was started again
    kept = {one.name: one for shard in client.checkpoints_by_shard() for one in shard if one.name == backup_name(one)}
    for name, one in kept.items():
        if one.step <= backed_up.step and name != backup_name(backed_up):
            with contextlib.suppress(NoTableError):  # another backup that ends now has released it
                client.release(name)


def _copy_shards(
    client: WeightClient, checkpoint: Checkpoint, info: TableInfo, directory: Path
) -> tuple[dict[str, Any], ...]:
    """Writes the files of all shards, several at once; returns `Backup.shards`."""
    stop = threading.Event()
    with ThreadPoolExecutor(_SHARDS_AT_ONCE) as threads:
        try:
            copies = [
                threads.submit(_copy_shard, client, shard, checkpoint, info, directory / f"shard-{shard}", stop)
                for shard in range(len(info.shards))
            ]
            for copy in as_completed(copies):
                copy.result()
        except KeyboardInterrupt:
            client.close()  # ends the threads' calls, also of a shard that stands still
            raise
        finally:
            stop.set()
    return tuple(copy.result() for copy in copies)


def _copy_shard(
    client: WeightClient, shard: int, checkpoint: Checkpoint, info: TableInfo, directory: Path, stop: threading.Event
) -> dict[str, Any]:
    """Writes a shard's files, unless told to stop; returns the shard's entry in `Backup.shards`."""
    directory.mkdir(PRIVATE_DIRECTORY)
    files = dict[str, dict[str, Any]]()

    def write(name: str, columns: dict[str, Any]) -> None:
        if stop.is_set():  # another shard's copy has failed
            raise CancelledError
        path = directory / name
        atomic_write(path, partial(save_file, columns), mode=PRIVATE_FILE)
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}

    reader = CheckpointReader(client, shard, checkpoint.name, info)
    write(SCHEDULE, {"learning_rates": client.learning_rates(shard=shard)[: checkpoint.step]})
    found, per_file = reader.blocks(), max(1, _FILE_BYTES // BlockCodec(info.spec).num_bytes)
    while blocks := list(islice(found, per_file)):
        columns = {
            "number": np.array([block.number for block in blocks], np.int64),
            "write_id": np.array([block.write_id for block in blocks], np.uint64),
            "content": np.frombuffer(b"".join(block.content for block in blocks), np.uint8).reshape(len(blocks), -1),
        }
        write(f"blocks-{blocks[0].number:015d}.safetensors", columns)
    counts = {"shard": shard, "rows": reader.rows_stored, "files": len(files)}
    _log.info("shard %(shard)d: %(rows)d rows in %(files)d files", counts)
    return {"rows_stored": reader.rows_stored, "lineage": reader.lineage, "files": files}


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
