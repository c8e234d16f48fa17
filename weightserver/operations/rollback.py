"""Returns all rows of a cluster to a checkpoint."""

from __future__ import annotations

import argparse

from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.protocol.codec import MAX_NAME_CHARACTERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=non_empty_name, help="the checkpoint's name")
    add_cluster_arguments(parser)
    parser.add_argument("--yes", action="store_true", help="roll back; without it, only print what would be lost")


def run(arguments: argparse.Namespace) -> None:
    name = arguments.name
    with connect(arguments) as client:
        steps = {checkpoint.name: checkpoint.step for checkpoint in client.checkpoints()}
        if name not in steps:
            raise ValueError(f"no checkpoint {name!r} on all shards: 'weightserver checkpoints' lists them")
        step, info = steps[name], client.describe()
        if not arguments.yes:
            raise ValueError(f"this would undo run {info.run!r} from step {info.clock} to {step}: give --yes to do it")
        client.open_session(f"rollback to {name}"[:MAX_NAME_CHARACTERS], force=True, take_over=True)
        client.rollback(name)
    print(f"rolled back to step {step}")
