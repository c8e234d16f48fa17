"""Returns all rows of a cluster to a checkpoint."""

from __future__ import annotations

import argparse

from weightserver.core.checkpoints import Checkpoint, common_checkpoints, partly_kept, who_keeps
from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.protocol.codec import MAX_NAME_CHARACTERS


def _kept_by_all(by_shard: list[tuple[Checkpoint, ...]], name: str) -> Checkpoint:
    """The checkpoint of that name, under any name that all shards have for it, such as that of its backup.

    Raises:
        ValueError: not all shards keep it.
    """
    known = {kept.checkpoint_id for those in by_shard for kept in those if kept.name == name}
    common = common_checkpoints(by_shard)
    for kept in sorted(common, key=lambda kept: kept.name != name):
        if kept.name == name or kept.checkpoint_id in known:
            return kept
    if not known:
        raise ValueError(f"no checkpoint {name!r} on all shards: 'weightserver checkpoints' lists them")
    remedy = "restore all shards from one backup, or fill all with the same 'weightserver reshard --checkpoint'"
    if common:
        remedy = f"roll back to one of steps {sorted({kept.step for kept in common})}, which all keep, or {remedy}"
    raise ValueError(
        f"{who_keeps(name, partly_kept(by_shard)[name])}, as after a checkpoint() that failed on others, or on shards "
        f"restored from different backups or filled from different checkpoints: {remedy}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=non_empty_name, help="the checkpoint's name")
    add_cluster_arguments(parser)
    parser.add_argument("--yes", action="store_true", help="roll back; without it, only print what would be lost")


def run(arguments: argparse.Namespace) -> None:
    name = arguments.name
    with connect(arguments) as client:
        info = client.describe(rates=False)  # a rollback mends shards that have used different ones
        kept = _kept_by_all([shard.checkpoints for shard in info.shards], name)
        if not arguments.yes:
            raise ValueError(
                f"this would undo run {info.run!r} from step {info.clock} to {kept.step}: give --yes to do it"
            )
        client.open_session(f"rollback to {name}"[:MAX_NAME_CHARACTERS], force=True, take_over=True)
        client.rollback(kept.name)
        client.copy_checkpoint(kept, name)  # some may have it for its backup only
    print(f"rolled back to step {kept.step}")
