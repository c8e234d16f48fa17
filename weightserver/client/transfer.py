"""How a client moves rows: each distinct row once, from and to the shard that holds it, in messages of about 1 MiB."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import Message

from weightserver.client.arguments import is_strictly_increasing
from weightserver.client.calls import STATISTICS
from weightserver.client.connection import ShardFetch
from weightserver.client.fan_out import Shards
from weightserver.client.fetched_rows import FetchedRows, Output
from weightserver.client.writer import Writer
from weightserver.core.arrays import Int64Array, StoredArray
from weightserver.core.precision import Precision
from weightserver.core.sharding import Sharding
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import CHUNK_BYTES, MAX_WRITE_BYTES, MAX_WRITE_ROWS, rows_to_proto, to_bytes


class BorrowedArrays:
    """The caller's arrays, which worker threads use until the context is left.

    Where an exception of the caller leaves it early, the threads stop using the arrays, and end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Entered by a thread while it uses the arrays. Raises CancelledError once the caller has left."""
        with self._lock:
            if self._returned:
                raise CancelledError
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._returned = True


def fetch_rows(
    shards: Shards,
    sharding: Sharding,
    request: pb.FetchRequest,
    rows: Int64Array,
    out: Output,
    precision: Precision,
) -> None:
    """Fetches each distinct row once, and fills the arrays in the order of `rows` (int64 [n])."""
    if is_strictly_increasing(rows):
        _fetch_distinct(shards, sharding, request, rows, out, precision)
        return
    distinct, inverse = np.unique(rows, return_inverse=True)

    def distinct_like(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.empty((len(distinct), *array.shape[1:]), array.dtype)

    weight, momentum_buffer, last_step = out
    fetched: Output = (
        distinct_like(weight),
        None if momentum_buffer is None else distinct_like(momentum_buffer),
        None if last_step is None else distinct_like(last_step),
    )
    _fetch_distinct(shards, sharding, request, distinct, fetched, precision)
    for whole, part in zip(out, fetched, strict=True):
        if whole is not None and part is not None:
            whole[:] = part[inverse]


def _fetch_distinct(
    shards: Shards,
    sharding: Sharding,
    request: pb.FetchRequest,
    rows: Int64Array,
    out: Output,
    precision: Precision,
) -> None:
    """Fetches strictly increasing rows (int64 [n])."""
    connections, started = shards.connections(), time.monotonic()
    with BorrowedArrays() as borrowed:
        fetches = [
            connections[shard].fetch(request, FetchedRows(rows, positions, out, precision, borrowed.in_use))
            for shard, positions in sharding.positions_by_shard(rows).items()
        ]
        try:
            if len(fetches) > 1 and sum(array.nbytes for array in out if array is not None) <= CHUNK_BYTES:
                shards.workers.run(partial(ShardFetch.try_together, fetches))  # one thread is faster than several
            shards.in_parallel(ShardFetch.run, ((fetch,) for fetch in fetches if not fetch.is_complete))
        finally:
            for fetch in fetches:
                fetch.abandon()
    shard_seconds = [fetch.shard_seconds for fetch in fetches]
    known = [seconds for seconds in shard_seconds if seconds is not None]
    slowest = max(known) if known and len(known) == len(shard_seconds) else None
    STATISTICS.fetched(len(rows), time.monotonic() - started, slowest, shards.watch.bounds)


@dataclass(frozen=True)
class RowWrite:
    """One push or state write of distinct rows."""

    method: str
    message: Callable[..., Message]
    """Makes one message of the call, from its `header`, `rows` and `arrays`."""
    step: int
    num_steps: int
    """It uses the learning rates of the first so many steps."""
    rows: Int64Array  # (n,), strictly increasing
    arrays: Mapping[str, StoredArray | Int64Array]  # (n, ...) each, by the name of their field

    @property
    def array_bytes_per_row(self) -> int:
        return sum(array.nbytes // len(self.rows) for array in self.arrays.values())

    def digest(self) -> bytes:
        """Recognises the same write when it is repeated."""
        hasher = xxhash.xxh3_128(f"{self.method} {self.step}".encode())
        for array in [self.rows, *self.arrays.values()]:
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.digest()

    def check_size(self, by_shard: Mapping[int, slice | Int64Array]) -> None:
        """Raises ValueError if a shard would receive more than one write may hold."""
        most = min(MAX_WRITE_ROWS, MAX_WRITE_BYTES // (8 + self.array_bytes_per_row))
        if len(self.rows) <= most:
            return
        largest = max(len(self.rows[positions]) for positions in by_shard.values())
        if largest > most:
            raise ValueError(f"{largest} rows of one shard in one write, at most {most} are taken: split it")

    def messages(
        self,
        make_header: Callable[..., pb.WriteHeader],
        positions: slice | Int64Array,
        rows_per_block: int,
        borrowed: BorrowedArrays,
    ) -> Iterator[Message]:
        """The messages to one shard, whose rows are at `positions`; only the first has a header."""
        with borrowed.in_use():
            rows = self.rows[positions]
            arrays = {name: array[positions] for name, array in self.arrays.items()}
        num_blocks = int(np.count_nonzero(np.diff(rows // rows_per_block, prepend=-1)))
        header: pb.WriteHeader | None = make_header(num_rows=len(rows), num_blocks=num_blocks)
        rows_per_message = max(1, CHUNK_BYTES // self.array_bytes_per_row)
        for start in range(0, len(rows), rows_per_message):
            chunk = slice(start, start + rows_per_message)
            with borrowed.in_use():
                values = {name: to_bytes(array[chunk]) for name, array in arrays.items()}
                message = self.message(header=header, rows=rows_to_proto(rows[chunk]), **values)
            yield message
            header = None


def write_rows(shards: Shards, sharding: Sharding, writer: Writer, write: RowWrite, table: int, schedule: int) -> None:
    """Sends a write to each shard that holds rows of it.

    Args:
        table: digest of the table.
        schedule: digest of the learning rates that the client knows.
    """
    by_shard = sharding.positions_by_shard(write.rows)
    if not by_shard:
        return
    write.check_size(by_shard)
    connections = shards.connections()

    def send(number: int, those: Collection[int]) -> list[Any]:
        def send_to_shard(shard: int) -> pb.WriteResponse:
            header = partial(writer.header, number, step=write.step, table=table, schedule=schedule)
            messages = partial(write.messages, header, by_shard[shard], sharding.rows_per_block, borrowed)
            return connections[shard].write(write.method, messages, len(write.rows[by_shard[shard]]))

        with BorrowedArrays() as borrowed:
            return shards.outcomes(send_to_shard, ((shard,) for shard in those))

    writer.write(write.digest(), by_shard, table, send)
