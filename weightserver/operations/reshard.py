"""Fills new shards with the rows of running ones, in another number, with another rows_per_block, or both.

Each new shard is filled over the network by a process of its own, which may be on the machine that will serve it. The
rows are those of one checkpoint, which the new shards keep under its name so that a trainer can resume from it. Only
rows that were ever written are read and written. The rows of a new shard are compared with the old ones before it can
be served.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from weightserver.client.client import WeightClient
from weightserver.common.atomic_files import to_path
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import Checkpoint, chosen_checkpoint, common_checkpoints
from weightserver.core.errors import InvalidRequestError, NoTableError
from weightserver.core.lineage import Lineage
from weightserver.core.sharding import MAX_SHARDS
from weightserver.core.spec import TableSpec
from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.operations.checkpoint_blocks import CheckpointReader
from weightserver.operations.reshard_rows import compare, fill
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.storage.shard_builder import ShardBuilder, TableState


@dataclass(frozen=True)
class Resharded:
    """What a new shard holds."""

    spec: TableSpec
    rows_stored: int
    checkpoint: str
    step: int
    """Finished updates that the rows hold."""
    left_behind: int
    """Later updates, which only the old shards hold."""


def reshard(
    client: WeightClient,
    target: Path,
    *,
    shard: int,
    num_shards: int,
    rows_per_block: int | None = None,
    checkpoint: str | None = None,
    current: bool = False,
) -> Resharded:
    """Fills the new directory of shard `shard` of `num_shards` with its rows of a checkpoint, by default the newest.

    Calls for different shards need not know of each other. An interrupted call may be repeated. Sessions and writers
    are not carried over: open a new session afterwards.

    Args:
        current: take a checkpoint of the rows as they are now, which nothing may write to meanwhile.

    Raises:
        ValueError: the target holds something else.
        NoTableError: not all shards keep the checkpoint, until the end.
        ClusterError, StorageError: blocks are missing or damaged; or, with `current`, the rows are of several times.
    """
    if current:
        checkpoint = _taken_now(client)
    info = client.describe()
    try:  # of the same answers, or it could have more rows and learning rates than these
        chosen = chosen_checkpoint(checkpoint, common_checkpoints([shard.checkpoints for shard in info.shards]))
    except NoTableError as error:
        if checkpoint is not None:
            raise
        raise NoTableError(f"{error}; --current takes one now, if nothing writes meanwhile") from None
    new = info.spec if rows_per_block is None else replace(info.spec, rows_per_block=rows_per_block)
    part = pb.Part(shard=shard, num_shards=num_shards, rows_per_block=new.rows_per_block)
    readers = [CheckpointReader(client, number, chosen.name, info, part) for number in range(len(info.shards))]
    kept = [chosen.name, chosen.step, chosen.checkpoint_id.hex()]
    origin = {"table": info.identity.hex(), "spec": asdict(new), "checkpoint": kept}
    with ShardBuilder(target, shard=shard, num_shards=num_shards, origin=origin) as builder:
        sources = [((block.number, block.content) for block in reader.blocks()) for reader in readers]
        digest = fill(sources, builder, info.spec, new)
        _require_kept(client, chosen)
        if not builder.finished:  # it may have been served since
            table = TableState(
                new,
                client.learning_rates()[: chosen.step],
                epoch=info.epoch,
                run=info.run,
                checkpoint=chosen,
                identity=info.identity,
                lineage=Lineage.of_all(reader.lineage for reader in readers),
            )
            same_rows = partial(compare, target, BlockCodec(new), digest)
            builder.finish(table, rows_stored=digest.num_rows, compare=same_rows)
    return Resharded(new, digest.num_rows, chosen.name, chosen.step, left_behind=max(0, info.clock - chosen.step))


def _taken_now(client: WeightClient) -> str:
    """Takes a checkpoint of the current rows, the same one for all new shards; returns its name."""
    client.require_common_state()
    client.join_newest_session()
    step = client.describe().clock
    name = f"current-{step}"
    kept = {known.name: list(known.marks) for known in client.checkpoints()}
    if kept.get(name) == client.marks():  # another call would only lead to a state that shards already filled lack
        return name
    try:
        client.checkpoint(name, step=step)
    except InvalidRequestError as error:
        if name not in kept:
            raise
        raise InvalidRequestError(
            f"rows were written since checkpoint {name!r} was taken for new shards: end what writes, release {name!r}, "
            "and fill all new shards again, in other directories"
        ) from error
    return name


def _require_kept(client: WeightClient, chosen: Checkpoint) -> None:
    """Raises NoTableError if another checkpoint took the name while it was read."""
    if chosen.checkpoint_id not in {kept.checkpoint_id for kept in client.checkpoints() if kept.name == chosen.name}:
        raise NoTableError(
            f"checkpoint {chosen.name!r} was released while it was read: stop the trainer, and repeat the command"
        )


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser, "--from")
    parser.add_argument("--shard", type=_shard, metavar="I/N", required=True, help="the new shard to fill, of N")
    parser.add_argument("--target", type=to_path, required=True, help="its new directory")
    parser.add_argument("--rows-per-block", type=int, help="rows per block of the new shards (default as before)")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--checkpoint",
        type=non_empty_name,
        help="the checkpoint whose rows to take and keep, the same for all new shards (default the newest of all)",
    )
    rows.add_argument(
        "--current", action="store_true", help="take and keep a checkpoint of the current rows: stop all writers first"
    )


def _shard(text: str) -> tuple[int, int]:
    """Parses I/N, a shard's number and the number of shards."""
    shard, _, num_shards = text.partition("/")
    if not (shard.isdecimal() and num_shards.isdecimal() and int(shard) < int(num_shards) <= MAX_SHARDS):
        raise argparse.ArgumentTypeError(
            f"must be I/N with I from 0 to N - 1 and N at most {MAX_SHARDS}, such as 0/3, got {text}"
        )
    return int(shard), int(num_shards)


def run(arguments: argparse.Namespace) -> None:
    shard, num_shards = arguments.shard
    with connect(arguments) as client:
        made = reshard(
            client,
            arguments.target,
            shard=shard,
            num_shards=num_shards,
            rows_per_block=arguments.rows_per_block,
            checkpoint=arguments.checkpoint,
            current=arguments.current,
        )
    print(
        f"filled shard {shard} of {num_shards} with {made.rows_stored} rows of checkpoint {made.checkpoint} (step "
        f"{made.step}), {made.spec.rows_per_block} per block; {made.left_behind} later updates remain only in the old "
        "shards"
    )
