"""Checks whether a shard is ready for clients, for containers and operators."""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weightserver.client.channels import open_channel
from weightserver.client.security import ClientSecurity
from weightserver.client.threads import outcomes, raise_first
from weightserver.common.logs import printable
from weightserver.common.options import add_options, given_options
from weightserver.core.errors import ShardUnavailableError
from weightserver.operations.arguments import add_addresses, given_addresses, positive_seconds
from weightserver.protocol.codec import NOT_READY_KEY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_addresses(parser, "the shard, or of several")
    parser.add_argument("--timeout-seconds", type=positive_seconds, default=5.0, help="deadline (default 5)")
    add_options(parser, ClientSecurity)


def run(arguments: argparse.Namespace) -> None:
    addresses = given_addresses(arguments)
    security = given_options(arguments, ClientSecurity)
    statuses = outcomes(_serving_status, [(address, security, arguments.timeout_seconds) for address in addresses])
    for address, status in zip(addresses, statuses, strict=True):
        if isinstance(status, str):
            print(status if len(addresses) == 1 else f"{address} {status}", flush=True)
    raise_first(statuses)
    if set(statuses) != {"SERVING"}:
        sys.exit(1)


def _serving_status(address: str, security: ClientSecurity, timeout_seconds: float) -> str:
    """SERVING, or why the shard is not ready.

    Raises:
        ShardUnavailableError: the shard did not answer.
    """
    with open_channel(address, security.credentials()) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer, call = check.with_call(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
        except grpc.RpcError as error:
            cause = " ".join(f"{error.code().name}: {error.details()}".split())
            raise ShardUnavailableError(
                f"{address} does not answer ({cause}): check that its shard is running and listens there, and the TLS "
                "options of both sides, or give a longer --timeout-seconds",
                shard=address,
            ) from None
    reason: bytes = dict(call.trailing_metadata() or ()).get(NOT_READY_KEY, b"")
    name = str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return printable(reason.decode(errors="replace")) or name
