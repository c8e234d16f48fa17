"""Deletes the table and all its rows."""

from __future__ import annotations

import argparse

from weightserver.core.errors import NoTableError
from weightserver.operations.arguments import add_cluster_arguments, connect, given_addresses
from weightserver.protocol._generated import weight_server_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("--yes", action="store_true", help="delete; without it, only print what would be deleted")


def run(arguments: argparse.Namespace) -> None:
    with connect(arguments) as client:
        # Repeats a drop that failed halfway: some shards may hold no table any more.
        answers = [
            client.call_shard(shard, "Describe", pb.DescribeRequest())
            for shard in range(len(given_addresses(arguments)))
        ]
        holding = [answer for answer in answers if answer.HasField("spec")]
        if not holding:
            raise NoTableError("no shard holds a table: there is nothing to drop")
        run, clock = max(holding, key=lambda answer: answer.epoch).run, max(answer.clock for answer in holding)
        what = f"{sum(answer.rows_stored for answer in holding)} stored rows of run {run!r} at step {clock}"
        if empty := ", ".join(str(answer.shard) for answer in answers if not answer.HasField("spec")):
            what += f" (shard {empty} holds no table)"
        if not arguments.yes:
            raise ValueError(f"this would delete {what}: give --yes to do it")
        client.drop_table()
    print(f"deleted {what}")
