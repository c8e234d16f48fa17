"""Lists the checkpoints that all shards keep, and tells which are only on some of them."""

from __future__ import annotations

import argparse
import itertools

from weightserver.common.logs import Remark, say
from weightserver.core.checkpoints import common_checkpoints, partly_kept, who_keeps
from weightserver.core.errors import ClusterError, DataLossError
from weightserver.operations.arguments import add_cluster_arguments, connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    with connect(arguments) as client:
        by_shard = client.checkpoints_by_shard()
        some = partly_kept(by_shard)
        advice = "'weightserver release' forgets it if a checkpoint() failed"
        if some:
            try:
                client.require_common_state()
            except (ClusterError, DataLossError) as error:  # a release would be refused
                advice = str(error)
    kept = common_checkpoints(by_shard)
    if not kept:
        say(Remark("none yet"))  # on stderr: stdout has a line for each checkpoint
    for checkpoint in kept:
        name = checkpoint.name if checkpoint.name.isprintable() else repr(checkpoint.name)
        print(f"{name}\tstep {checkpoint.step}")
    for name, groups in some.items():
        line = f"{who_keeps(name, groups)}: {advice}"
        say(Remark(line, checkpoint=name, shards=sorted(itertools.chain(*groups))))
