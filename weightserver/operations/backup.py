"""Backs up a checkpoint of running shards to files; `backup_files` describes them.

The shards keep the checkpoint under a second name, `backup-…`, so that training may continue and release the first.
They keep it until a backup of a later checkpoint has ended: a shard that is lost until then can be restored from the
backup, and the others rolled back to the same state. While a backup is made, they keep it under a name of that one,
which it releases when it fails; what a killed one left is released when one of a later checkpoint has ended.

Because they keep it, they also know which blocks were written since: an increment has only these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from weightserver.client.client import WeightClient
from weightserver.client.results import TableInfo
from weightserver.client.threads import outside_main
from weightserver.common.object_store import ObjectStoreError, shown, to_location
from weightserver.common.version import FORMAT, __version__
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import Checkpoint, backup_name, chosen_checkpoint, common_checkpoints, is_for_backup
from weightserver.core.errors import ClusterError, NoTableError, WeightServerError
from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.operations.backup_files import SCHEDULE, Backup, read_backup
from weightserver.operations.backup_places import MANIFEST, Place, Write, place_at
from weightserver.operations.checkpoint_blocks import CheckpointReader

_FILE_BYTES = 64 << 20
"""Bytes of blocks in a file, if that is at least one block."""
_SHARDS_AT_ONCE = 8
"""Shards that are copied at the same time, each through a few times the memory of a file."""

_log = logging.getLogger(__name__)


def backup(
    client: WeightClient,
    directory: Path,
    *,
    checkpoint: str | None = None,
    incremental: bool = False,
    keep: int | None = None,
) -> Backup:
    """Copies a checkpoint that all shards keep, by default the newest, to a new or empty `directory`, which may be in a
    bucket: `Path("s3://bucket/name")`.

    The directory appears once it is complete. From then on the shards keep this checkpoint for backups, and no earlier
    one. Ctrl-C while it copies closes the client.

    Args:
        incremental: copy only the blocks that were written since the last backup, if that is beside this one.
        keep: afterwards, remove the table's other backups beside this one, but the newest (`keep` with this one) and
            those that they need, and what killed backups left there.

    Raises:
        ValueError: the directory holds something, or the base was removed meanwhile.
        NoTableError: the checkpoint does not exist or was released, by a backup of a later one too.
        StorageError: a block is damaged.
        ClusterError: a shard sent other blocks than it keeps, or keeps other ones than the base of an increment has.
        OSError: the disk is full, or another process writes to the directory.
        ObjectStoreError: the object store refuses, or does not answer.
    """
    place = place_at(directory)
    with place.new() as write:
        chosen = chosen_checkpoint(checkpoint, client.checkpoints())
        client.join_newest_session()
        with _held(client, chosen) as held:
            info = client.describe()
            others = _others(place, info.identity.hex()) if incremental or keep is not None else {}
            name, base = _last_backup(others, held, info) if incremental else ("", None)
            shards = _copy_shards(client, held, base, info, write)
            made = Backup(
                checkpoint=chosen.name,
                step=chosen.step,
                identity=chosen.checkpoint_id.hex(),
                run=info.run,
                epoch=info.epoch,
                spec=info.spec,
                version=__version__,
                created=_time_after(others),
                shards=shards,
                table_identity=info.identity.hex(),
                base=name,
                base_sha256="" if base is None else base.digest,
            )
            if base is not None and place.beside(name).read(MANIFEST) is None:
                raise ValueError(
                    f"backup {name}, the base of this one, was removed while it was copied, as by --keep of another "
                    "command: repeat the command"
                )
            client.join_newest_session()  # another one if the trainer was started again
            client.copy_checkpoint(held, backup_name(chosen))
            text = json.dumps({"format": FORMAT, "sha256": made.digest, "backup": asdict(made)}, indent=2) + "\n"
            write(MANIFEST, text.encode())
    _release_earlier(client, chosen, held.name)
    if keep is not None:
        _remove_others(place, made, keep)
    return made


@contextlib.contextmanager
def _held(client: WeightClient, chosen: Checkpoint) -> Iterator[Checkpoint]:
    """Lets the shards keep a checkpoint under a name of this backup; releases that on failure, except for Ctrl-C, which
    closes the client."""
    held = replace(chosen, name=f"{backup_name(chosen)}-{os.urandom(4).hex()}")
    client.copy_checkpoint(chosen, held.name)  # by its identity: another may take its name meanwhile
    try:
        yield held
    except Exception as error:
        with contextlib.suppress(WeightServerError):
            client.release(held.name, join=True)
        if isinstance(error, NoTableError):
            raise NoTableError(
                f"what the shards kept for this backup, of checkpoint {chosen.name!r} or of its base, was released "
                "while it was copied, by another backup that has ended, by a rollback or by hand: repeat the command"
            ) from error
        raise


def _others(place: Place, table_identity: str) -> dict[str, Backup]:
    """The table's backups beside this one, oldest first, by name."""
    found = dict[str, Backup]()
    for name in place.names():
        try:
            found[name] = read_backup(place.beside(name))
        except ObjectStoreError:
            raise
        except (ValueError, PermissionError):  # no backup, a damaged one, another version's, or another user's
            continue
    return {
        name: made
        for name, made in sorted(found.items(), key=lambda item: item[1].created)
        if name != place.name and made.table_identity == table_identity
    }


def _time_after(others: dict[str, Backup]) -> str:
    """The time, or one after those of other backups: the clock by which these were made may have been ahead."""
    times = (datetime.fromisoformat(made.created) + timedelta(microseconds=1) for made in others.values())
    return max([datetime.now(UTC), *times]).isoformat(timespec="microseconds")


def _last_backup(others: dict[str, Backup], held: Checkpoint, info: TableInfo) -> tuple[str, Backup | None]:
    """The newest of other backups, and its name, whose checkpoint all shards still keep, not later than `held`; empty
    and None if there is none."""
    common = [one.name for one in common_checkpoints([shard.checkpoints for shard in info.shards])]
    kept = {backup_name(held), *takewhile(lambda name: name != held.name, common)}.intersection(common)
    for name, made in reversed(others.items()):
        if backup_name(made.kept) in kept and len(made.shards) == len(info.shards):
            return name, made
    return "", None


def _remove_others(place: Place, made: Backup, keep: int) -> None:
    """Removes the older backups of the table beside this one, but those that a kept one needs. Newer ones stay: two
    commands at once would remove each other's."""
    others = _others(place, made.table_identity)
    newest, needed = [*reversed(others)], set[str]()
    num_newer = sum(other.created >= made.created for other in others.values())
    wanted = [made.base, *newest[: max(keep - 1, num_newer)]]
    while wanted:
        if (name := wanted.pop()) in others and name not in needed:
            needed.add(name)
            wanted.append(others[name].base)
    for name in newest:  # increments before their bases
        if name not in needed:
            with contextlib.suppress(FileNotFoundError):  # another command removes it too
                place.beside(name).remove()
            _log.info("removed backup %(name)s", {"name": name})
    place.remove_killed()


def _release_earlier(client: WeightClient, backed_up: Checkpoint, meanwhile: str) -> None:
    """Releases what the shards kept meanwhile, and for backups of earlier checkpoints, killed ones among them."""
    kept = {one.name: one for shard in client.checkpoints_by_shard() for one in shard if is_for_backup(one)}
    for name, one in kept.items():
        is_earlier = one.step <= backed_up.step and not name.startswith(backup_name(backed_up))
        if is_earlier or name == meanwhile:
            with contextlib.suppress(NoTableError):  # another backup that ends now has released it
                client.release(name, join=True)


def _copy_shards(
    client: WeightClient, checkpoint: Checkpoint, base: Backup | None, info: TableInfo, write: Write
) -> tuple[dict[str, Any], ...]:
    """Writes the files of all shards, several at once; returns `Backup.shards`."""
    stop, pool = threading.Event(), ThreadPoolExecutor(_SHARDS_AT_ONCE)

    def copy_all() -> tuple[dict[str, Any], ...]:
        copies = [
            pool.submit(_copy_shard, client, shard, checkpoint, base, info, write, stop)
            for shard in range(len(info.shards))
        ]
        for copy in as_completed(copies):
            copy.result()
        return tuple(copy.result() for copy in copies)

    try:
        return outside_main(copy_all)
    except KeyboardInterrupt:
        client.close()  # ends the threads' calls, also of a shard that stands still
        raise
    finally:
        stop.set()
        outside_main(pool.shutdown)


def _copy_shard(
    client: WeightClient,
    shard: int,
    checkpoint: Checkpoint,
    base: Backup | None,
    info: TableInfo,
    write: Write,
    stop: threading.Event,
) -> dict[str, Any]:
    """Writes a shard's files, unless told to stop; returns the shard's entry in `Backup.shards`."""
    files = dict[str, dict[str, Any]]()

    def write_columns(name: str, columns: dict[str, Any]) -> None:
        if stop.is_set():  # another shard's copy has failed
            raise CancelledError
        content = save(columns)
        stored = write(f"shard-{shard}/{name}", content)
        files[Path(stored).name] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}

    reader = CheckpointReader(client, shard, checkpoint.name, info, since=backup_name(base.kept) if base else "")
    if base is not None and reader.digest(reader.since).hex() != base.shards[shard].get("digest"):
        raise ClusterError(
            f"shard {shard} keeps other blocks of checkpoint {base.checkpoint!r} than its backup has, as after a "
            "reshard: make a backup that is not incremental"
        )
    write_columns(SCHEDULE, {"learning_rates": client.learning_rates(shard=shard)[: checkpoint.step]})
    found, per_file = reader.blocks(), max(1, _FILE_BYTES // BlockCodec(info.spec).num_bytes)
    while blocks := list(islice(found, per_file)):
        columns = {
            "number": np.array([block.number for block in blocks], np.int64),
            "write_id": np.array([block.write_id for block in blocks], np.uint64),
            "content": np.frombuffer(b"".join(block.content for block in blocks), np.uint8).reshape(len(blocks), -1),
        }
        write_columns(f"blocks-{blocks[0].number:015d}.safetensors", columns)
    counts = {"shard": shard, "rows": reader.rows_stored, "files": len(files)}
    _log.info("shard %(shard)d: %(rows)d rows in %(files)d files", counts)
    whole = reader.digest(checkpoint.name).hex()
    return {"rows_stored": reader.rows_stored, "lineage": reader.lineage, "digest": whole, "files": files}


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--output", type=to_location, required=True, help="a new directory, or s3://BUCKET/NAME")
    parser.add_argument(
        "--checkpoint", type=non_empty_name, help="the checkpoint's name (default the newest that all shards keep)"
    )
    parser.add_argument(
        "--incremental",
        action="store_true",
        help="copy only what was written since the last backup, which is beside OUTPUT; all if there is none",
    )
    parser.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="then remove the table's older backups beside OUTPUT, except the newest N and those that they need",
    )


def run(arguments: argparse.Namespace) -> None:
    if arguments.keep is not None and arguments.keep < 1:
        raise ValueError(f"--keep {arguments.keep} would remove this backup too: give at least 1")
    with connect(arguments) as client:
        made = backup(
            client,
            arguments.output,
            checkpoint=arguments.checkpoint,
            incremental=arguments.incremental,
            keep=arguments.keep,
        )
    kind = f", since backup {made.base}" if made.base else ", all: there is no base" if arguments.incremental else ""
    print(
        f"backed up {made.rows_stored} rows of checkpoint {made.checkpoint} (step {made.step}) of {len(made.shards)} "
        f"shards, {made.num_bytes} bytes, to {shown(arguments.output)}{kind}"
    )
