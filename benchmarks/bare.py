"""A gRPC server that only sends or receives bytes, as the lower bound of benchmarks. Prints its address and serves
until stdin closes: python -m benchmarks.bare
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc.experimental import ChannelOptions

from weightserver.common.malloc import keep_large_buffers
from weightserver.protocol.codec import CHUNK_BYTES, MAX_MESSAGE_BYTES

_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
_CHANNEL_OPTIONS = [*_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1)]  # 8 % faster


@functools.cache
def _messages(request: bytes) -> list[bytes]:
    """As many bytes as the request names, in the messages of a stream."""
    num_bytes = int(request)
    return [bytes(min(CHUNK_BYTES, num_bytes - start)) for start in range(0, num_bytes, CHUNK_BYTES)]


def _send_stream(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
    yield from _messages(request)


def _send_call(request: bytes, _: grpc.ServicerContext) -> bytes:
    return b"".join(_messages(request))


def _take_stream(requests: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
    return str(sum(len(request) for request in requests)).encode()


@contextmanager
def bare_server() -> Iterator[grpc.Channel]:
    """Runs the server in a process of its own; yields a channel to it.

    Raises:
        SystemExit: it ended before it served.
    """
    command = [sys.executable, "-m", "benchmarks.bare"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not (address := process.stdout.readline().strip()):
            raise SystemExit("the bare server did not start")
        with grpc.insecure_channel(address, _CHANNEL_OPTIONS) as channel:
            yield channel  # leaving the process closes its stdin


def main() -> None:
    keep_large_buffers()
    server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS)
    handlers = {
        "SendStream": grpc.unary_stream_rpc_method_handler(_send_stream),
        "SendCall": grpc.unary_unary_rpc_method_handler(_send_call),
        "TakeStream": grpc.stream_unary_rpc_method_handler(_take_stream),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Bare", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(None)


if __name__ == "__main__":
    main()
