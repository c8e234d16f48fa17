"""The command `weightserver serve`."""

from __future__ import annotations

import argparse

from weightserver.common.atomic_files import to_path
from weightserver.common.security import TOKEN_VARIABLE
from weightserver.server.config import ServerConfig
from weightserver.server.process import serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_shard_arguments(parser)
    _add_security_arguments(parser)
    parser.add_argument("--reflection", action="store_true", help="serve the contract by gRPC reflection")
    parser.add_argument(
        "--slow-request-seconds", type=float, default=1.0, help="log requests that take longer (default 1)"
    )
    parser.add_argument("--announce", action="store_true", help="print the addresses as one JSON line once serving")
    parser.add_argument("--stop-with-parent", action="store_true", help="stop when stdin is closed")


def _add_shard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=to_path, required=True, help="the shard's own directory, on a local disk")
    parser.add_argument(
        "--init",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="create a new, empty shard if the directory is empty or missing (default: refuse to serve it)",
    )
    parser.add_argument("--shard", type=int, default=0, help="number of this shard, from 0 (default 0)")
    parser.add_argument("--num-shards", type=int, default=1, help="shards in the cluster (default 1)")
    parser.add_argument("--listen", default="127.0.0.1:50051", help="host:port (default 127.0.0.1:50051)")
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics on this port")
    parser.add_argument("--metrics-host", default="127.0.0.1", help="address of the metrics (default 127.0.0.1)")
    parser.add_argument(
        "--grace-seconds", type=float, default=10.0, help="time for running calls to end after SIGTERM (default 10)"
    )
    parser.add_argument(
        "--request-memory-mib", type=int, default=4096, help="memory for all requests in progress (default 4096)"
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=10.0,
        help="time until the call of a silent caller is cancelled (default 10)",
    )
    parser.add_argument(
        "--no-verify-reads", dest="verify_reads", action="store_false", help="skip the checksums of fetched rows"
    )


def _add_security_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls-cert", type=to_path, help="serve TLS with this certificate (PEM)")
    parser.add_argument("--tls-key", type=to_path, help="the key of --tls-cert (PEM)")
    parser.add_argument(
        "--tls-client-ca", type=to_path, help="accept only clients with a certificate signed by this CA (PEM)"
    )
    parser.add_argument(
        "--token-file", type=to_path, help=f"file with the token that calls must carry (default ${TOKEN_VARIABLE})"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="allow listening beyond loopback without TLS or a token"
    )


def run(arguments: argparse.Namespace) -> None:
    serve(ServerConfig(**{name: getattr(arguments, name) for name in ServerConfig.__dataclass_fields__}))
