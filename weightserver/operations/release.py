"""Deletes a checkpoint from all shards."""

from __future__ import annotations

import argparse

from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=non_empty_name, help="the checkpoint's name")
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    with connect(arguments) as client:
        if any(kept.name == arguments.name for shard in client.checkpoints_by_shard() for kept in shard):
            client.join_newest_session()
        client.release(arguments.name)  # raises if no shard keeps it
    print(f"released {arguments.name}")
