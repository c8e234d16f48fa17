"""LMDB with one row a key behind the smallest gRPC service that serves it.

The server: python -m benchmarks.peers.lmdb_service DIRECTORY PORT
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np

from benchmarks.bare import CHANNEL_OPTIONS, OPTIONS
from benchmarks.peers.embedded import LmdbRows
from benchmarks.peers.peer import (
    CORRECTION,
    DIM,
    EXACTLY_ONCE,
    ROW_BYTES,
    PeerError,
    ServedPeer,
    Server,
    free_port,
    keys_of,
    made_rows,
    rows_of,
    values_of,
)
from weightserver.common.malloc import keep_large_buffers
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.protocol.codec import CHUNK_BYTES

_CHUNK_ROWS = CHUNK_BYTES // ROW_BYTES
_START_SECONDS = 60


class LmdbService(ServedPeer):
    key, name, durable, does_not = "lmdb-grpc", "LMDB over gRPC", True, (CORRECTION, EXACTLY_ONCE)
    _channel: grpc.Channel | None = None

    def start(self) -> None:
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.peers.lmdb_service", str(self.directory), str(port)]
        self._server = Server(command, self.directory / "log")
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS)
        try:
            grpc.channel_ready_future(self._channel).result(_START_SECONDS)
        except grpc.FutureTimeoutError:
            raise PeerError("its service did not start") from None
        self._fetch, self._write = self._channel.unary_stream("/Rows/Fetch"), self._channel.stream_unary("/Rows/Write")

    def fill(self) -> None:
        for ids, rows in made_rows(self.num_rows):
            self.write(ids, rows)

    def fetch(self, ids: Int64Array) -> Float32Array:
        out = np.empty((len(ids), DIM), np.float32)
        first = 0
        for chunk in self._fetch(ids.tobytes()):
            rows = rows_of([chunk])
            out[first : first + len(rows)] = rows
            first += len(rows)
        return out

    def write(self, ids: Int64Array, rows: Float32Array) -> None:
        self._write(_messages(ids, rows))

    def disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()


def _messages(ids: Int64Array, rows: Float32Array) -> Iterator[bytes]:
    yield ids.tobytes()
    for first in range(0, len(rows), _CHUNK_ROWS):
        yield rows[first : first + _CHUNK_ROWS].tobytes()


def _keys(ids: bytes) -> list[bytes]:
    return keys_of(np.frombuffer(ids, np.int64))


def main() -> None:
    keep_large_buffers()
    rows = LmdbRows(Path(sys.argv[1]))

    def fetch(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        keys = _keys(request)
        for first in range(0, len(keys), _CHUNK_ROWS):
            yield rows.values(keys[first : first + _CHUNK_ROWS])

    def write(requests: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        keys = _keys(next(requests))
        rows.write(keys, [value for request in requests for value in values_of(rows_of([request]))])
        return b""

    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    handlers = {
        "Fetch": grpc.unary_stream_rpc_method_handler(fetch),
        "Write": grpc.stream_unary_rpc_method_handler(write),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Rows", handlers)])
    server.add_insecure_port(f"127.0.0.1:{sys.argv[2]}")
    server.start()
    signal.sigwait({signal.SIGTERM})
    server.stop(None)
    rows.close()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
