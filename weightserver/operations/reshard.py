"""Creates new shards from old ones, with another number of shards, another rows_per_block, or both.

From running shards, each new one is filled over the network by a process of its own, which may be on the machine that
will serve it; on a machine that sees the directories of all old shards, which nothing serves, all at once. The rows are
those of one checkpoint, which the new shards keep under its name so that a trainer can resume from it, or from
directories the current rows. Only rows that were ever written are read and written. The rows of each new shard are
compared with the old ones before it can be served.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from weightserver.common.atomic_files import to_path
from weightserver.core.blocks import BlockCodec
from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.operations.reshard_remote import reshard_from
from weightserver.operations.reshard_rows import Resharded, compare, fill
from weightserver.operations.reshard_sources import (
    SourceShard,
    common_spec,
    open_source,
    require_one_time,
    table_state,
)
from weightserver.storage.shard_builder import ShardBuilder, TableState

_MAX_SHARDS = 2**31 - 1
"""Of `Part.num_shards`, an int32."""

_log = logging.getLogger(__name__)


def reshard(
    sources: Sequence[Path],
    targets: Sequence[Path],
    *,
    rows_per_block: int | None = None,
    checkpoint: str | None = None,
    current: bool = False,
) -> Resharded:
    """Fills the new directories `targets`, one per new shard in order, from the directories of all old shards.

    Takes the rows of `checkpoint`, by default the newest that all old shards keep, or with `current` the current rows
    and no checkpoint. Sessions and writers are not carried over: open a new session afterwards. An interrupted call may
    be repeated.

    Raises:
        ValueError: the sources are not all shards of one table, or a target holds something else.
        NoTableError: the checkpoint does not exist.
        StorageError: a directory is damaged or in use.
    """
    if len({path.resolve() for path in [*sources, *targets]}) < len(sources) + len(targets):
        raise ValueError("a directory is given twice")
    for target, source in itertools.product(targets, sources):
        if target.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"{target} lies in {source}, an old shard's directory: give one beside it")
    with ExitStack() as stack:
        shards = [open_source(directory, stack) for directory in sources]
        old = common_spec(shards)
        if current:
            require_one_time(shards)
        new = old if rows_per_block is None else replace(old, rows_per_block=rows_per_block)
        table = table_state(shards, new, checkpoint, current)
        if table.checkpoint is not None:
            shards = [replace(shard, checkpoint=table.checkpoint.name) for shard in shards]
        origin = _origin(shards, table, len(targets))
        builders = [
            stack.enter_context(ShardBuilder(directory, shard=shard, num_shards=len(targets), origin=origin))
            for shard, directory in enumerate(targets)
        ]
        digests = fill([shard.blocks() for shard in shards], builders, old, new, len(builders))
        for builder, digest in zip(builders, digests, strict=True):
            if not builder.finished:  # it may have been served since
                same_rows = partial(compare, builder.directory, BlockCodec(new), digest)
                builder.finish(table, rows_stored=digest.num_rows, compare=same_rows)
    rows_stored = sum(digest.num_rows for digest in digests)
    _log.info("compared all %(rows)d rows", {"rows": rows_stored})
    kept = table.checkpoint
    name, step = (kept.name, kept.step) if kept else (None, table.clock)
    newest = max(shard.state.clock for shard in shards)
    return Resharded(new, rows_stored, name, step, left_behind=max(0, newest - table.clock))


def _origin(shards: list[SourceShard], table: TableState, num_targets: int) -> dict[str, Any]:
    """Identifies what the new shards are made from."""
    kept = table.checkpoint
    return {
        "states": [shard.state.mark for shard in sorted(shards, key=lambda shard: shard.identity.shard)],
        "spec": asdict(table.spec),
        "num_shards": num_targets,
        "checkpoint": kept and [kept.name, kept.step, kept.checkpoint_id.hex()],
    }


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser, "--from")
    parser.add_argument("--shard", type=_shard, metavar="I/N", help="with --from: the new shard to fill, of N")
    parser.add_argument(
        "--source", type=to_path, nargs="+", help="instead of --from: the directories of all old shards"
    )
    parser.add_argument(
        "--target",
        type=to_path,
        nargs="+",
        required=True,
        help="a new directory with --from; with --source, new directories of shards 0, 1, ...",
    )
    parser.add_argument("--rows-per-block", type=int, help="rows per block of the new shards (default as before)")
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--checkpoint",
        type=non_empty_name,
        help="the checkpoint whose rows to take and keep, the same for all new shards (default the newest of all)",
    )
    rows.add_argument(
        "--current", action="store_true", help="with --source: take the current rows, and keep no checkpoint"
    )


def _shard(text: str) -> tuple[int, int]:
    """Parses I/N, a shard's number and the number of shards."""
    shard, _, num_shards = text.partition("/")
    if not (shard.isdecimal() and num_shards.isdecimal() and int(shard) < int(num_shards) <= _MAX_SHARDS):
        raise argparse.ArgumentTypeError(
            f"must be I/N with I from 0 to N - 1 and N at most {_MAX_SHARDS}, such as 0/3, got {text}"
        )
    return int(shard), int(num_shards)


def run(arguments: argparse.Namespace) -> None:
    if bool(arguments.source) == bool(arguments.addresses):
        raise ValueError("give either --from, the addresses of all old shards, or --source, their directories")
    chosen = {"rows_per_block": arguments.rows_per_block, "checkpoint": arguments.checkpoint}
    if arguments.source:
        if arguments.shard:
            raise ValueError("--shard is for --from: with --source, --target names the directories of all new shards")
        made = reshard(arguments.source, arguments.target, **chosen, current=arguments.current)
        became = f"{len(arguments.source)} shards became {len(arguments.target)}"
    else:
        if arguments.shard is None or len(arguments.target) > 1 or arguments.current:
            raise ValueError(
                "--from fills one shard with a checkpoint: give --shard I/N, one --target and no --current"
            )
        shard, num_shards = arguments.shard
        with connect(arguments) as client:
            made = reshard_from(client, arguments.target[0], shard=shard, num_shards=num_shards, **chosen)
        became = f"filled shard {shard} of {num_shards}"
    what = f"checkpoint {made.checkpoint} (step {made.step})" if made.checkpoint else f"step {made.step}"
    print(
        f"{became} with {made.rows_stored} rows of {what}, {made.spec.rows_per_block} per block; {made.left_behind} "
        "later updates remain only in the old shards"
    )
