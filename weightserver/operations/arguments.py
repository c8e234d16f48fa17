"""Arguments that several commands share."""

from __future__ import annotations

import argparse

from weightserver.client.client import WeightClient
from weightserver.client.security import ClientSecurity
from weightserver.common.addresses import parse_addresses
from weightserver.common.options import add_options, given_options

_RETRY_SECONDS = 10
"""Operators wait less patiently than training runs."""
_CALL_SECONDS = 600
"""A rollback, and the end of a backup, look at all versions of a shard: a few µs each."""
_MAX_SECONDS = 3600


def add_cluster_arguments(parser: argparse.ArgumentParser, option: str | None = None) -> None:
    """Adds the shards' addresses, as positional arguments or an option, and the options for calling them securely."""
    add_addresses(parser, "every shard", option)
    parser.add_argument(
        "--wait-for-servers",
        type=positive_seconds,
        default=15.0,
        metavar="SECONDS",
        help="for the first answers (default 15)",
    )
    add_options(parser, ClientSecurity)


def add_addresses(parser: argparse.ArgumentParser, of: str, option: str | None = None) -> None:
    """Adds one or several addresses; `of` says whose they are."""
    text = f"host:port of {of}, separated by commas or blanks; ws-{{0..63}}.ws:50051 for 64"
    if option is None:
        parser.add_argument("addresses", nargs="+", metavar="HOST:PORT,…", help=text)
    else:
        parser.add_argument(option, dest="addresses", nargs="+", required=True, metavar="HOST:PORT,…", help=text)


def given_addresses(arguments: argparse.Namespace) -> list[str]:
    """The addresses given by the options of `add_addresses`. Raises ValueError for none or an invalid one."""
    addresses = parse_addresses(*arguments.addresses)
    if not addresses:
        raise ValueError("no address is given: give host:port,host:port of all shards")
    return addresses


def connect(arguments: argparse.Namespace) -> WeightClient:
    """A client of the cluster given by the options of `add_cluster_arguments`."""
    security = given_options(arguments, ClientSecurity)
    return WeightClient(
        given_addresses(arguments),
        timeout_seconds=_CALL_SECONDS,
        retry_seconds=_RETRY_SECONDS,
        connect_seconds=arguments.wait_for_servers,
        **security.client_arguments(),
    )


def positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be positive and at most {_MAX_SECONDS}, got {text}")
    return seconds


def non_empty_name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: is a variable not set?")
    return text
