"""Adds rows to the table."""

from __future__ import annotations

import argparse

from weightserver.operations.arguments import add_cluster_arguments, connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--num-rows", type=int, required=True, help="N, the new total number of rows")


def run(arguments: argparse.Namespace) -> None:
    with connect(arguments) as client:
        print(f"the table has {client.extend_table(arguments.num_rows).num_rows} rows")
