"""Arguments that several commands share."""

from __future__ import annotations

import argparse

from weightserver.client.client import WeightClient
from weightserver.client.security import ClientSecurity

_RETRY_SECONDS = 10
"""Operators wait less patiently than training runs."""


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the shards' addresses and the options for calling them securely."""
    parser.add_argument("addresses", nargs="+", help="host:port of every shard")
    ClientSecurity.add_arguments(parser)


def connect(arguments: argparse.Namespace) -> WeightClient:
    """A client of the cluster given by the options of `add_cluster_arguments`."""
    security = ClientSecurity.from_arguments(arguments)
    return WeightClient(arguments.addresses, retry_seconds=_RETRY_SECONDS, **security.client_arguments())


def non_empty_name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: is a variable not set?")
    return text
