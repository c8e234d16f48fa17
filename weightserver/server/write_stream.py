"""The messages of one write as arrays, filled as they arrive: nothing of them is kept twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Float32Array, Int64Array, all_finite
from weightserver.core.errors import InvalidRequestError
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import count_rows, rows_from_proto
from weightserver.shard.transaction import WriteHeader


def write_header(header: pb.WriteHeader) -> WriteHeader:
    return WriteHeader(
        epoch=header.epoch,
        opener=header.opener,
        writer=header.writer,
        sequence=header.sequence,
        settled_before=header.settled_before,
        step=header.step,
        schedule=header.schedule,
    )


class ReceivedWrite:
    """A write of `header.num_rows` rows, whose float32 [n, dim] fields are `names`.

    Raises:
        InvalidRequestError: by every method.
    """

    def __init__(self, header: pb.WriteHeader, dim: int, names: tuple[str, ...]) -> None:
        self.header = write_header(header)
        self.num_rows, self._dim = header.num_rows, dim
        self._num_messages = 0
        self._rows = _Array("rows", np.empty(header.num_rows, np.int64))
        self._values = [_Array(name, np.empty(header.num_rows * dim, np.float32)) for name in names]
        self._steps = _Array("last_step", np.empty(header.num_rows, np.int64))

    def rows_with(self, message: pb.PushGradientsRequest | pb.WriteStateRequest) -> tuple[int, int]:
        """How many rows are named, and for how many there are values, once `message` is added."""
        num_values = max(values.filled + len(getattr(message, values.name)) // 4 for values in self._values)
        return self._rows.filled + count_rows(message.rows), -(-num_values // self._dim)

    def add(self, message: pb.PushGradientsRequest | pb.WriteStateRequest) -> None:
        """Takes the next message's rows and values."""
        count = count_rows(message.rows)
        if self._rows.filled + count > self.num_rows:  # not made first: ranges are short for what they name
            raise self._wrong_number(self._rows.filled + count)
        if not count and self._num_messages and self.num_rows:
            raise InvalidRequestError("a message of a write names no rows: leave it away")
        self._num_messages += 1
        self._rows.add(rows_from_proto(message.rows))
        for values in self._values:
            values.add_bytes(getattr(message, values.name), self.num_rows, self._dim)
        if isinstance(message, pb.WriteStateRequest):
            self._steps.add_bytes(message.last_step, self.num_rows, 1)

    def rows(self) -> Int64Array:
        """int64 [n], once all messages are there."""
        if self._rows.filled != self.num_rows:
            raise self._wrong_number(self._rows.filled)
        rows: Int64Array = self._rows.array
        return rows

    def values(self) -> list[Float32Array]:
        """float32 [n, dim] of each name, finite."""
        for values in self._values:
            if values.filled != len(values.array):
                raise values.wrong_length(values.filled, self.num_rows, self._dim)
            if not all_finite(values.array):
                raise InvalidRequestError(f"{values.name} holds NaN or infinite values: nothing was written")
        return [values.array.reshape(self.num_rows, self._dim) for values in self._values]

    def last_step(self) -> Int64Array:
        """int64 [n]."""
        if self._steps.filled != self.num_rows:
            raise InvalidRequestError(f"{self.num_rows} rows came with {self._steps.filled} last_steps")
        steps: Int64Array = self._steps.array
        return steps

    def _wrong_number(self, brought: int) -> InvalidRequestError:
        return InvalidRequestError(f"the write announced {self.num_rows} rows and brought {brought}")


class _Array:
    """An array that is filled from its beginning."""

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
