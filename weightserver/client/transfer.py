"""How a client moves rows: each distinct row once, from and to the shard that holds it, in messages of about 1 MiB."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash
from google.protobuf.message import Message

from weightserver.client import metrics, threads
from weightserver.client.arguments import is_strictly_increasing
from weightserver.client.calls import WATCH
from weightserver.client.checkpoints import find_checkpoint
from weightserver.client.connection import ShardConnection
from weightserver.client.fan_out import Shards
from weightserver.client.fetched_rows import FetchedRows, Output
from weightserver.client.rates import CarriedRates
from weightserver.client.schedule import ClientSchedule
from weightserver.client.threads import Caller, raise_first
from weightserver.client.writer import Writer
from weightserver.common.metrics import size_class
from weightserver.core.arrays import Int64Array, StoredArray
from weightserver.core.checkpoints import Checkpoint
from weightserver.core.precision import precision_of
from weightserver.core.sharding import Sharding
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import CHUNK_BYTES, MAX_WRITE_BYTES, MAX_WRITE_ROWS, rows_to_proto, to_bytes


def fetch_rows(
    shards: Shards,
    schedule: ClientSchedule,
    spec: TableSpec,
    rows: Int64Array,
    out: Output,
    step: int | None,
    checkpoint: str | Checkpoint,
) -> None:
    """Fetches each distinct row once, and fills the arrays in the order of `rows` (int64 [n]): of raw rows without a
    step, of all state if there is an array of momentum buffers."""
    request = pb.FetchRequest(state=out[1] is not None, raw=step is None, step=step, table=shards.table)
    rates = None if step is None else schedule.needed(step)
    if checkpoint:
        kept = find_checkpoint(shards, checkpoint)
        request.checkpoint, request.identity = kept.name, kept.checkpoint_id
    connections, started, distinct, fetched = shards.connections(), time.monotonic(), rows, out
    if not (in_order := is_strictly_increasing(rows)):
        distinct, inverse = np.unique(rows, return_inverse=True)
        fetched = [
            array if array is None else np.empty((len(distinct), *array.shape[1:]), array.dtype) for array in out
        ]
    by_shard, caller = Sharding(spec.rows_per_block, len(connections)).positions_by_shard(distinct), Caller()
    parts = [FetchedRows(distinct, at, fetched, precision_of(spec), caller) for at in by_shard.values()]
    calls = [(connections[shard], request, rates, part) for shard, part in zip(by_shard, parts, strict=True)]
    try:
        raise_first(threads.outcomes(ShardConnection.fetch, calls, caller=caller))
    except BaseException:
        WATCH.leave(parts)
        raise
    if not in_order:
        for whole, values in zip(out, fetched, strict=True):
            if whole is not None and values is not None:
                whole[:] = values[inverse]
    known = [part.shard_seconds for part in parts if part.shard_seconds is not None]
    size = size_class(len(rows))
    metrics.fetch_seconds(size).observe(time.monotonic() - started)
    if known and len(known) == len(parts):
        metrics.slowest_shard_seconds(size).observe(max(known))


@dataclass(frozen=True)
class RowWrite:
    """One push or state write of distinct rows."""

    message: type[pb.PushGradientsRequest | pb.WriteStateRequest]
    step: int
    rows: Int64Array  # (n,), strictly increasing
    arrays: Mapping[str, StoredArray | Int64Array]  # (n, ...) each, by the name of their field

    @property
    def method(self) -> str:
        return self.message.__name__.removesuffix("Request")

    @property
    def adds(self) -> bool:
        """Whether it adds to the rows instead of replacing them."""
        return self.message is pb.PushGradientsRequest

    @property
    def num_steps(self) -> int:
        """The number of steps whose learning rates it uses."""
        return self.step + self.adds

    def num_steps_at(self, positions: slice | Int64Array) -> int:
        """The number of steps whose learning rates the rows at `positions` use."""
        return self.num_steps if self.adds else int(self.arrays["last_step"][positions].max())

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
        caller: Caller,
        rates: pb.Rates,
    ) -> Iterator[Message]:
        """The messages to one shard, whose rows are at `positions`; only the first has a header."""
        with caller.lock:
            caller.require()
            rows = self.rows[positions]
            arrays = {name: array[positions] for name, array in self.arrays.items()}
        num_blocks = int(np.count_nonzero(np.diff(rows // rows_per_block, prepend=-1)))
        header: pb.WriteHeader | None = make_header(num_rows=len(rows), num_blocks=num_blocks, rates=rates)
        rows_per_message = max(1, CHUNK_BYTES // max(4, self.array_bytes_per_row))  # their ids take up to 2 MiB
        for start in range(0, len(rows), rows_per_message):
            chunk = slice(start, start + rows_per_message)
            with caller.lock:
                caller.require()
                values = {name: to_bytes(array[chunk]) for name, array in arrays.items()}
                message = self.message(header=header, rows=rows_to_proto(rows[chunk]), **values)
            yield message
            header = None


def write_rows(shards: Shards, spec: TableSpec, writer: Writer, write: RowWrite, rates: CarriedRates) -> None:
    """Sends a write to each shard that holds rows of it; `rates` are those that it uses."""
    connections = shards.connections()
    by_shard = Sharding(spec.rows_per_block, len(connections)).positions_by_shard(write.rows)
    if not by_shard:
        return
    write.check_size(by_shard)

    def send(number: int, those: Collection[int]) -> list[Any]:
        caller = Caller()

        def send_to_shard(shard: int) -> pb.WriteResponse:
            header = partial(writer.header, number, step=write.step)
            messages = partial(write.messages, header, by_shard[shard], spec.rows_per_block, caller)
            used = rates.of_shard(write.num_steps_at(by_shard[shard]))
            num_rows = len(write.rows[by_shard[shard]])
            answer: pb.WriteResponse = connections[shard].call(write.method, messages, rates=used, num_rows=num_rows)
            return answer

        return threads.outcomes(send_to_shard, ((shard,) for shard in those), caller=caller, not_main=True)

    writer.write(write.digest(), list(by_shard), send, num_steps=write.num_steps, adds=write.adds)
