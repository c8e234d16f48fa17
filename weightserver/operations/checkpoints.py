"""Lists the checkpoints that all shards keep."""

from __future__ import annotations

import argparse

from weightserver.common.logs import Remark, say
from weightserver.operations.arguments import add_cluster_arguments, connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    with connect(arguments) as client:
        kept = client.checkpoints()
        if not kept:
            say(Remark("none yet"))  # on stderr: stdout has a line for each checkpoint
        for checkpoint in kept:
            name = checkpoint.name if checkpoint.name.isprintable() else repr(checkpoint.name)
            print(f"{name}\tstep {checkpoint.step}")
