"""Lists the checkpoints that all shards keep."""

from __future__ import annotations

import argparse

from weightserver.operations.arguments import add_cluster_arguments, connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    with connect(arguments) as client:
        for checkpoint in client.checkpoints():
            name = checkpoint.name if checkpoint.name.isprintable() else repr(checkpoint.name)
            print(f"{name}\tstep {checkpoint.step}")
