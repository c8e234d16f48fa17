"""Deletes a checkpoint from all shards."""

from __future__ import annotations

import argparse

from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=non_empty_name, help="the checkpoint's name")
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    with connect(arguments) as client:
        client.release(arguments.name, join=True)
    print(f"released {arguments.name}")
