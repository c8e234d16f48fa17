"""Lists the checkpoints that all shards keep, and tells which are only on some of them."""

from __future__ import annotations

import argparse

from weightserver.common.logs import Remark, say
from weightserver.core.checkpoints import common_checkpoints, partly_kept
from weightserver.operations.arguments import add_cluster_arguments, connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    with connect(arguments) as client:
        by_shard = client.checkpoints_by_shard()
    kept = common_checkpoints(by_shard)
    if not kept:
        say(Remark("none yet"))  # on stderr: stdout has a line for each checkpoint
    for checkpoint in kept:
        name = checkpoint.name if checkpoint.name.isprintable() else repr(checkpoint.name)
        print(f"{name}\tstep {checkpoint.step}")
    for name, shards in partly_kept(by_shard).items():
        line = f"only shards {shards} keep {name!r}: 'weightserver release' forgets it if a checkpoint() failed"
        say(Remark(line, checkpoint=name, shards=shards))
