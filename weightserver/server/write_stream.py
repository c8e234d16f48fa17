"""Receives the messages of one write into arrays, without keeping anything twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import StoredArray
from weightserver.core.errors import InvalidRequestError
from weightserver.core.precision import precision_of
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import MAX_WRITE_BYTES, MAX_WRITE_ROWS, named_rows
from weightserver.server.checks import require, write_header
from weightserver.server.request_memory import write_bytes
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader

WriteRequest = pb.PushGradientsRequest | pb.WriteStateRequest


def receive(
    messages: Iterator[WriteRequest], names: tuple[str, ...], shard: Shard, reserve: Callable[[int], None]
) -> ReceivedWrite:
    """Receives all messages of one write, whose fields of values are `names`.

    Args:
        reserve: called with the bytes that the write needs until it is on disk, before any of them is taken.

    Raises:
        InvalidRequestError: a message is malformed, or the write is too large.
    """
    first = next(messages, None)
    if first is None or not first.HasField("header"):
        raise InvalidRequestError("the first message of a write has no header")
    write = _begun(first.header, names, shard, reserve)
    write.add(first)
    del first  # its memory is the call's no longer
    for message in messages:
        require(len(message.rows.ids) + len(message.rows.ranges) > 0, "a message of a write names no rows: omit it")
        write.add(message)
    write.check_complete()
    return write


def _begun(
    header: pb.WriteHeader, names: tuple[str, ...], shard: Shard, reserve: Callable[[int], None]
) -> ReceivedWrite:
    """Checks the header of a write before anything is reserved for it."""
    made = write_header(header)
    require(
        0 <= header.num_rows <= MAX_WRITE_ROWS,
        f"{header.num_rows} rows in one write, at most {MAX_WRITE_ROWS} are accepted: split it",
    )
    table = shard.require_table(header.table)
    spec = table.spec
    require(
        header.num_rows * (8 + spec.value_bytes * len(names) * spec.dim) <= MAX_WRITE_BYTES,
        f"more than {MAX_WRITE_BYTES} bytes in one write: split it",
    )
    require(
        0 <= header.num_blocks <= header.num_rows,
        f"num_blocks must lie in 0..num_rows, got {header.num_blocks} and {header.num_rows}",
    )
    reserve(write_bytes(table.codec, header.num_rows, header.num_blocks or header.num_rows, len(names)))
    return ReceivedWrite(made, header, spec, names)


class ReceivedWrite:
    """A write of `sizes.num_rows` rows, whose fields `names` are [n, dim] in the table's dtype."""

    def __init__(self, header: WriteHeader, sizes: pb.WriteHeader, spec: TableSpec, names: tuple[str, ...]) -> None:
        self.header = header
        self.rows, self.last_step = (np.empty(sizes.num_rows, np.int64) for _ in range(2))
        self.values: dict[str, StoredArray] = {
            name: np.empty((sizes.num_rows, spec.dim), precision_of(spec).dtype) for name in names
        }
        self._spec = spec
        self._num_blocks = sizes.num_blocks or sizes.num_rows
        self._filled = 0

    def add(self, message: WriteRequest) -> None:
        """Adds the next message's rows and values. Raises InvalidRequestError if they do not fit."""
        named = named_rows(message.rows)
        part = slice(self._filled, self._filled + named.count)
        self._check_number(part.stop, part.stop <= len(self.rows))
        self.rows[part], self._filled = named.array(), part.stop
        for name, values in self.values.items():
            _fill(values[part], getattr(message, name), name)
            if not precision_of(self._spec).all_finite(values[part]):
                raise InvalidRequestError(f"{name} holds NaN or infinite values: nothing was written")
        if isinstance(message, pb.WriteStateRequest):
            _fill(self.last_step[part], message.last_step, "last_step")

    def check_complete(self) -> None:
        """Raises InvalidRequestError unless the messages were those that the header announced."""
        self._check_number(self._filled, self._filled == len(self.rows))
        num_blocks = int(np.count_nonzero(np.diff(self.rows // self._spec.rows_per_block, prepend=-1)))
        require(
            num_blocks <= self._num_blocks, f"the write announced {self._num_blocks} blocks and changes {num_blocks}"
        )

    def _check_number(self, found: int, good: bool) -> None:
        require(good, f"the write announced {len(self.rows)} rows and contained {found}")


def _fill(part: npt.NDArray[Any], data: bytes, name: str) -> None:
    require(len(data) == part.nbytes, f"{name} of {len(part)} rows has {len(data)} bytes, they need {part.nbytes}")
    part[:] = np.frombuffer(data, part.dtype.newbyteorder("<")).reshape(part.shape)
