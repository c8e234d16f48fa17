"""The memory that requests in progress may hold together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightserver.core.blocks import rows_per_group
from weightserver.core.errors import InvalidRequestError, OverloadedError
from weightserver.core.spec import TableSpec
from weightserver.protocol.codec import CHUNK_BYTES
from weightserver.server.lanes import LANES

_PAGE = 4096
_BYTES_PER_ROW_NAMED = 48
"""A row's number, and the arrays that checking it and assigning it to blocks takes meanwhile."""
_SHARE_KEPT = 8
"""One part in this many of the memory is kept for other lanes than the one that holds the rest."""


class RequestMemory:
    """Limits the bytes that all calls in progress hold, and those of one lane to seven eighths of that. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lane_bytes = limit_bytes - limit_bytes // _SHARE_KEPT
        self.on_full: Callable[[str | None], None] = lambda lane: None
        """Called when a reservation fails, with the lane that is at its limit, or None if all lanes together are."""
        self._lock = threading.Lock()
        self._used = Counter(dict.fromkeys(LANES, 0))

    @property
    def used_bytes(self) -> int:
        return self._used.total()

    @contextmanager
    def reservation(self, lane: str) -> Iterator[Reservation]:
        """A reservation that is released when the context is left."""
        reserved = Reservation(self, lane)
        try:
            yield reserved
        finally:
            with self._lock:
                self._used[lane] -= reserved.num_bytes

    def _take(self, lane: str, num_bytes: int) -> None:
        with self._lock:
            lane_full = self._used[lane] + num_bytes > self.lane_bytes
            full = lane_full or self._used.total() + num_bytes > self.limit_bytes
            if not full:
                self._used[lane] += num_bytes
        if full:
            self.on_full(lane if lane_full else None)
            raise OverloadedError("the shard has no memory for another request now: try again")


class Reservation:
    """The bytes that one call has reserved."""

    def __init__(self, memory: RequestMemory, lane: str) -> None:
        self._memory = memory
        self._lane = lane
        self.num_bytes = 0

    def require(self, num_bytes: int) -> None:
        """Raises InvalidRequestError if `num_bytes` in all exceed what any call may ever hold. Reserves nothing."""
        if num_bytes > self._memory.lane_bytes:
            raise InvalidRequestError(
                f"the request needs {num_bytes >> 20} MiB of memory, the shard has {self._memory.lane_bytes >> 20} MiB "
                "for all requests of its kind: split it, or give the shard more --request-memory-mib"
            )

    def take(self, num_bytes: int) -> None:
        """Reserves more bytes.

        Raises:
            OverloadedError: the memory is in use now.
            InvalidRequestError: the reservation could never fit.
        """
        if num_bytes > 0:
            self.require(self.num_bytes + num_bytes)
            self._memory._take(self._lane, num_bytes)
            self.num_bytes += num_bytes

    def take_up_to(self, num_bytes: int) -> None:
        """Grows the reservation to `num_bytes` in all. Raises as `take`."""
        self.take(num_bytes - self.num_bytes)


# ---- costs of requests


def fetch_bytes(spec: TableSpec, num_rows: int) -> int:
    """Upper bound of a fetch: its rows' numbers, and one chunk as it is read, corrected, framed and sent."""
    rows_per_chunk = max(1, CHUNK_BYTES // (spec.value_bytes * spec.dim)) + spec.rows_per_block
    return _BYTES_PER_ROW_NAMED * num_rows + 4 * min(num_rows, rows_per_chunk) * (8 + 8 * spec.dim)


def write_bytes(spec: TableSpec, num_rows: int, values_per_row: int) -> int:
    """Bytes of a write in memory: its rows' numbers, and values with a flag each whether it is finite."""
    return num_rows * (_BYTES_PER_ROW_NAMED + (spec.value_bytes + 1) * values_per_row)


def blocks_bytes(spec: TableSpec, num_blocks: int) -> int:
    """Bytes of blocks in a transaction until it is on disk: whole pages, and one more for the key of each."""
    num_groups = -(-spec.rows_per_block // rows_per_group(spec))
    block_bytes = 64 + spec.rows_per_block * (9 + 2 * spec.value_bytes * spec.dim) + 8 * num_groups
    return num_blocks * (-(-block_bytes // _PAGE) + 1) * _PAGE


def answer_bytes(num_bytes: int) -> int:
    """Bytes of an answer of one message: its parts, the message or its serialized bytes, and gRPC's copy."""
    return 3 * num_bytes
