"""Receives the messages of one write into arrays, without keeping anything twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Int64Array, StoredArray
from weightserver.core.errors import InvalidRequestError
from weightserver.core.precision import precision_of
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import MAX_WRITE_BYTES, MAX_WRITE_ROWS, named_rows
from weightserver.server.checks import check_header, given_rates, require
from weightserver.server.request_memory import write_bytes
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader


def receive(
    messages: Iterator[pb.PushGradientsRequest] | Iterator[pb.WriteStateRequest],
    names: tuple[str, ...],
    shard: Shard,
    reserve: Callable[[int], None],
) -> ReceivedWrite:
    """Receives all messages of one write, whose fields of values are `names`.

    Args:
        reserve: called with the bytes that the write needs until it is on disk, before any of them is taken.

    Raises:
        InvalidRequestError: a message is malformed, or the write is too large.
    """
    write: ReceivedWrite | None = None
    for message in messages:
        if write is None:
            require(message.HasField("header"), "the first message of a write has no header")
            write = _begin(message.header, names, shard, reserve)
        write.add(message)
    if write is None:
        raise InvalidRequestError("the first message of a write has no header")
    return write


def _begin(
    header: pb.WriteHeader, names: tuple[str, ...], shard: Shard, reserve: Callable[[int], None]
) -> ReceivedWrite:
    """Checks the header of a write before anything is reserved for it."""
    check_header(header)
    require(
        0 <= header.num_rows <= MAX_WRITE_ROWS,
        f"{header.num_rows} rows in one write, at most {MAX_WRITE_ROWS} are accepted: split it",
    )
    shard.check_table(header.table)
    spec = shard.require_table().spec
    require(
        header.num_rows * (8 + spec.value_bytes * len(names) * spec.dim) <= MAX_WRITE_BYTES,
        f"more than {MAX_WRITE_BYTES} bytes in one write: split it",
    )
    require(
        0 <= header.num_blocks <= header.num_rows,
        f"num_blocks must lie in 0..num_rows, got {header.num_blocks} and {header.num_rows}",
    )
    reserve(write_bytes(spec, header.num_rows, header.num_blocks or header.num_rows, len(names)))
    return ReceivedWrite(header, spec, names)


def write_header(header: pb.WriteHeader) -> WriteHeader:
    return WriteHeader(
        epoch=header.epoch,
        session_id=header.session_id,
        writer=header.writer,
        sequence=header.sequence,
        step=header.step,
        rates=given_rates(header.rates),
    )


class ReceivedWrite:
    """A write of `header.num_rows` rows, whose fields `names` are [n, dim] in the table's dtype.

    Raises:
        InvalidRequestError: by every method, if the messages do not fit the header.
    """

    def __init__(self, header: pb.WriteHeader, spec: TableSpec, names: tuple[str, ...]) -> None:
        self.header = write_header(header)
        self.spec = spec
        self.num_rows, self._dim = header.num_rows, spec.dim
        self._num_blocks = header.num_blocks or header.num_rows
        self._precision = precision_of(spec)
        self._num_messages = 0
        self._rows = _Array("rows", np.empty(header.num_rows, np.int64))
        self._values = [_Array(name, np.empty(header.num_rows * spec.dim, self._precision.dtype)) for name in names]
        self._steps = _Array("last_step", np.empty(header.num_rows, np.int64))

    def add(self, message: pb.PushGradientsRequest | pb.WriteStateRequest) -> None:
        """Adds the next message's rows and values."""
        named = named_rows(message.rows)
        if self._rows.filled + named.count > self.num_rows:
            raise self._wrong_number(self._rows.filled + named.count)
        if not named.count and self._num_messages and self.num_rows:
            raise InvalidRequestError("a message of a write names no rows: omit it")
        self._num_messages += 1
        self._rows.add(named.array())
        for values in self._values:
            values.add_bytes(getattr(message, values.name), self.num_rows, self._dim)
        if isinstance(message, pb.WriteStateRequest):
            self._steps.add_bytes(message.last_step, self.num_rows, 1)

    def rows(self) -> Int64Array:
        """int64 [n], once all messages are added."""
        if self._rows.filled != self.num_rows:
            raise self._wrong_number(self._rows.filled)
        rows: Int64Array = self._rows.array
        num_blocks = int(np.count_nonzero(np.diff(rows // self.spec.rows_per_block, prepend=-1)))
        require(
            num_blocks <= self._num_blocks, f"the write announced {self._num_blocks} blocks and changes {num_blocks}"
        )
        return rows

    def values(self) -> list[StoredArray]:
        """[n, dim] of each name, in the table's dtype, finite."""
        for values in self._values:
            if values.filled != len(values.array):
                raise values.wrong_length(values.filled, self.num_rows, self._dim)
            if not self._precision.all_finite(values.array):
                raise InvalidRequestError(f"{values.name} holds NaN or infinite values: nothing was written")
        return [values.array.reshape(self.num_rows, self._dim) for values in self._values]

    def last_step(self) -> Int64Array:
        """int64 [n]."""
        if self._steps.filled != self.num_rows:
            raise InvalidRequestError(f"{self.num_rows} rows came with {self._steps.filled} last_steps")
        steps: Int64Array = self._steps.array
        return steps

    def _wrong_number(self, found: int) -> InvalidRequestError:
        return InvalidRequestError(f"the write announced {self.num_rows} rows and contained {found}")


class _Array:
    """An array that is filled from the front."""

    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        self.name = name
        self.array = array
        self.filled = 0

    def add(self, part: npt.NDArray[Any]) -> None:
        self.array[self.filled : self.filled + len(part)] = part
        self.filled += len(part)

    def add_bytes(self, data: bytes, num_rows: int, dim: int) -> None:
        size = self.array.itemsize
        if len(data) % size:
            raise InvalidRequestError(f"{self.name} has {len(data)} bytes, not a multiple of {size}")
        if self.filled + len(data) // size > len(self.array):
            raise self.wrong_length(self.filled + len(data) // size, num_rows, dim)
        self.add(np.frombuffer(data, self.array.dtype.newbyteorder("<")))

    def wrong_length(self, found: int, num_rows: int, dim: int) -> InvalidRequestError:
        return InvalidRequestError(f"{self.name} holds {found} values, {num_rows} rows of {dim} need others")
