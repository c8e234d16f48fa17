"""What carries the bytes: threads or asyncio in the server, TCP, a local socket or TLS.

python -m benchmarks.transport [--rounds 30] [--output benchmarks/results]

Servers that only send bytes, each a process of its own, called in turn by one client: an empty call, the bytes of 512
rows as one message, and those of 65,536 rows as a stream of 1 MiB messages (D = 128). Then empty calls of 16 threads at
once, and the large stream in messages of other sizes, or as several streams. The bytes of a fetch are the lower bound
of its time, whatever the row store does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import grpc

from benchmarks.bare import CHANNEL_OPTIONS, OPTIONS, bare_server, messages, serving, wanted
from benchmarks.measure import Timing, at_least, in_turn, write_results
from weightserver.common.malloc import keep_large_buffers
from weightserver.operations.certificates import write_certificates
from weightserver.protocol.codec import CHUNK_BYTES

KINDS = {
    "threads": "threads, TCP",
    "asyncio": "asyncio, TCP",
    "local": "threads, local socket",
    "tls": "threads, TLS",
}
_SMALL_BYTES, _LARGE_BYTES = 512 * 512, 65_536 * 512
_MESSAGE_BYTES = 64 << 10, 256 << 10, CHUNK_BYTES, 4 << 20, 16 << 20
_STREAMS = 2, 4
_CALLERS, _CALLS = 16, 20
_DEADLINE_SECONDS = 60


def serve(kind: str, directory: Path) -> None:
    """Serves until stdin closes; prints the address."""
    keep_large_buffers()
    address = f"unix:{directory}/socket" if kind == "local" else "127.0.0.1:0"
    if kind == "asyncio":
        asyncio.run(_serve_asynchronously(address))
        return
    server = bare_server()
    if kind == "tls":
        pair = (directory / "server-key.pem").read_bytes(), (directory / "server.pem").read_bytes()
        port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port(address)
    server.start()
    print(address if kind == "local" else f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(None)


async def _serve_asynchronously(address: str) -> None:
    async def stream(request: bytes, _: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for message in messages(request):
            yield message

    async def call(request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return b"".join(messages(request))

    server = grpc.aio.server(options=OPTIONS)
    handlers = {
        "SendStream": grpc.unary_stream_rpc_method_handler(stream),
        "SendCall": grpc.unary_unary_rpc_method_handler(call),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Bare", handlers)])
    port = server.add_insecure_port(address)
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


@contextmanager
def _channel(kind: str, directory: Path) -> Iterator[grpc.Channel]:
    """A channel to a server in a process of its own."""
    with serving("benchmarks.transport", "--serve", kind, "--directory", str(directory)) as address:
        if kind == "tls":
            credentials = grpc.ssl_channel_credentials((directory / "ca.pem").read_bytes())
            channel = grpc.secure_channel(address, credentials, CHANNEL_OPTIONS)
        else:
            channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        with channel:
            yield channel


def _take_stream(channel: grpc.Channel, num_bytes: int, message_bytes: int = CHUNK_BYTES) -> None:
    answer = channel.unary_stream("/Bare/SendStream")(wanted(num_bytes, message_bytes), timeout=_DEADLINE_SECONDS)
    if sum(map(len, answer)) != num_bytes:
        raise SystemExit("transport: a stream was cut short")


def _take_call(channel: grpc.Channel, num_bytes: int) -> None:
    channel.unary_unary("/Bare/SendCall")(wanted(num_bytes), timeout=_DEADLINE_SECONDS)


def _many_callers(channel: grpc.Channel, pool: ThreadPoolExecutor) -> None:
    calls = [pool.submit(_take_call, channel, 0) for _ in range(_CALLERS * _CALLS)]
    for call in calls:
        call.result()


def _streams(channel: grpc.Channel, pool: ThreadPoolExecutor, count: int) -> None:
    """65,536 rows by so many streams at once."""
    for call in [pool.submit(_take_stream, channel, _LARGE_BYTES // count) for _ in range(count)]:
        call.result()


def measure(rounds: int) -> tuple[dict[str, dict[str, Timing]], dict[str, Timing]]:
    """The seconds of each access through each kind of transport, and of ways to stream 65,536 rows by threads and
    TCP."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_certificates(directory, ["127.0.0.1"])
        pool = stack.enter_context(ThreadPoolExecutor(_CALLERS))
        channels = {kind: stack.enter_context(_channel(kind, directory)) for kind in KINDS}
        accesses: dict[str, Callable[[grpc.Channel], None]] = {
            "empty call": partial(_take_call, num_bytes=0),
            "512 rows, call": partial(_take_call, num_bytes=_SMALL_BYTES),
            "65,536 rows, stream": partial(_take_stream, num_bytes=_LARGE_BYTES),
            f"{_CALLERS * _CALLS} empty calls by {_CALLERS} threads": partial(_many_callers, pool=pool),
        }
        ways: dict[str, Callable[[], object]] = {
            f"messages of {size // 1024:,} KiB": partial(_take_stream, channels["threads"], _LARGE_BYTES, size)
            for size in _MESSAGE_BYTES
        }
        for count in _STREAMS:
            ways[f"{count} streams at once"] = partial(_streams, channels["threads"], pool, count)
        by_transport = {
            name: in_turn({kind: partial(access, channel) for kind, channel in channels.items()}, rounds=rounds)
            for name, access in accesses.items()
        }
        return by_transport, in_turn(ways, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=30)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.directory)
        return
    keep_large_buffers()
    results, ways = measure(options.rounds)
    lines = [f"| ms, median (10–90 %) | {' | '.join(KINDS.values())} |", "|---|" + "---|" * len(KINDS)]
    lines += [
        f"| {name} | {' | '.join(str(timings[kind]).removesuffix(' ms') for kind in KINDS)} |"
        for name, timings in results.items()
    ]
    lines += ["", f"| 65,536 rows by {KINDS['threads']} | ms |", "|---|---|"]
    lines += [f"| {name} | {str(value).removesuffix(' ms')} |" for name, value in ways.items()]
    command = f"python -m benchmarks.transport --rounds {options.rounds}"
    write_results(options.output, "transport", command, {**results, "65,536 rows": ways}, "\n".join(lines))


if __name__ == "__main__":
    main()
