"""The memory that requests in progress may hold together."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, Future

import grpc

from weightserver.core.blocks import PAGE_BYTES, BlockCodec
from weightserver.core.errors import InvalidRequestError
from weightserver.core.spec import TableSpec
from weightserver.protocol.codec import CHUNK_BYTES

SCHEDULE_BYTES_PER_STEP = 80
"""A learning rate and its transfer products, up to twice what they need."""
_BYTES_PER_ROW_NAMED = 56
"""A row's number, its last step, and the arrays that checking it and assigning it to blocks takes meanwhile."""


class RequestMemory:
    """Bytes that all calls in progress hold, first come, first served. Thread-safe.

    A call reserves once, all that it will need, before it holds any of it: so no two calls wait for each other.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Calls that wait for memory."""
        return len(self._waiting)

    def reserve(self, num_bytes: int, context: grpc.ServicerContext) -> None:
        """Waits until `num_bytes` are free, and reserves them until the call has ended and its answer was taken.

        Raises:
            InvalidRequestError: the reservation could never fit.
            CancelledError: the caller is gone.
        """
        if num_bytes > self.limit_bytes:
            raise InvalidRequestError(
                f"the request needs {num_bytes >> 20} MiB of memory, the shard has {self.limit_bytes >> 20} MiB for "
                "all requests: split it, or give the shard more --request-memory-mib"
            )
        granted = Future[None]()
        with self._lock:
            self._waiting.append((num_bytes, granted))
            self._grant()
        if not context.add_callback(lambda: self._end(num_bytes, granted)):
            self._end(num_bytes, granted)
            raise CancelledError
        granted.result()

    def _grant(self) -> None:
        while self._waiting and self.used_bytes + self._waiting[0][0] <= self.limit_bytes:
            num_bytes, granted = self._waiting.popleft()
            self.used_bytes += num_bytes
            granted.set_result(None)

    def _end(self, num_bytes: int, granted: Future[None]) -> None:
        with self._lock:
            if granted.cancel():  # it still waited
                self._waiting.remove((num_bytes, granted))
            else:
                self.used_bytes -= num_bytes
            self._grant()


# ---- costs of requests


def fetch_bytes(spec: TableSpec, num_rows: int, num_rates: int) -> int:
    """Upper bound of a fetch: its rows' numbers, one chunk as it is read, corrected, framed and sent, and the learning
    rates of the first `num_rates` steps if it names others than the shard holds."""
    rows_per_chunk = max(1, CHUNK_BYTES // (spec.value_bytes * spec.dim)) + spec.rows_per_block
    chunk_bytes = 4 * min(num_rows, rows_per_chunk) * (8 + 8 * spec.dim)
    return _BYTES_PER_ROW_NAMED * num_rows + chunk_bytes + SCHEDULE_BYTES_PER_STEP * num_rates


def write_bytes(codec: BlockCodec, num_rows: int, num_blocks: int, num_arrays: int) -> int:
    """Bytes of a write until it is on disk: its rows' numbers, their values in `num_arrays` arrays, and the blocks that
    it changes."""
    values = codec.precision.dtype.itemsize * num_arrays * codec.dim
    return num_rows * (_BYTES_PER_ROW_NAMED + values) + blocks_bytes(codec, num_blocks)


def blocks_bytes(codec: BlockCodec, num_blocks: int) -> int:
    """Bytes of blocks in a transaction until it is on disk: whole pages, and one more for the key of each."""
    return num_blocks * (codec.stored_bytes + PAGE_BYTES)


def answer_bytes(num_bytes: int) -> int:
    """Bytes of an answer of one message: its parts, the message or its serialized bytes, and gRPC's copy."""
    return 3 * num_bytes
