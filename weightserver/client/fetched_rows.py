"""The rows of a fetch as they arrive from one shard, each stored where the caller asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightserver.client.threads import Caller
from weightserver.core.arrays import Int64Array
from weightserver.core.errors import ClusterError, InvalidRequestError
from weightserver.core.precision import Precision
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import CHUNK_BYTES, MAX_ROWS, decode_fetch_response, rows_to_proto

Output = Sequence[npt.NDArray[Any] | None]
"""weight float32 [n, D], momentum_buffer float32 [n, D] and last_step int64 [n]; None for what was not asked for."""


class FetchedRows:
    """One shard's rows of a fetch, in ascending order: those that have arrived, then those still to be asked for.

    Args:
        rows: all rows that the caller asked for, strictly increasing, int64 [n].
        positions: positions of this shard's rows among them.
        out: receives the rows.
        precision: how values are sent.
        caller: who lends `out`.
    """

    def __init__(
        self,
        rows: Int64Array,
        positions: slice | Int64Array,
        out: Output,
        precision: Precision,
        caller: Caller,
    ) -> None:
        self._rows = rows[positions]
        self._positions = positions
        self._out = out
        self._precision = precision
        weight = out[0]
        assert weight is not None
        self._row_bytes: int = precision.dtype.itemsize * weight.shape[1]
        self._caller = caller
        self.num_rows = len(self._rows)
        self.num_asked = 0
        """Number of rows that have arrived or that the newest request names."""
        self.num_arrived = 0
        self.shard_seconds: float | None = None
        """How long the last answer took the shard itself; None if it does not say that."""

    def request(self, like: pb.FetchRequest) -> pb.FetchRequest:
        """A request like `like` for the rows that have not arrived, at most as many as one fetch may name."""
        missing = self._rows[self.num_arrived : self.num_arrived + MAX_ROWS]
        self.num_asked = self.num_arrived + len(missing)
        request = pb.FetchRequest(rows=rows_to_proto(missing))
        request.MergeFrom(like)
        return request

    @property
    def fit_one_message(self) -> bool:
        """Whether the answer to the newest request is one message."""
        return 0 < self._row_bytes * (self.num_asked - self.num_arrived) <= CHUNK_BYTES

    def add(self, message: bytes) -> None:
        """Stores the rows of the next message of a shard's answer.

        Raises:
            ClusterError: it holds more rows than were asked for.
            InvalidRequestError: it is not a FetchResponse.
        """
        parts = decode_fetch_response(message)
        if len(parts[0]) % self._row_bytes:
            raise InvalidRequestError("an answer holds part of a row")
        start, end = self.num_arrived, self.num_arrived + len(parts[0]) // self._row_bytes
        if end > self.num_asked:
            raise ClusterError(f"a shard answered {end} of {self.num_asked} rows: is it of the same version?")
        where = slice(start, end) if isinstance(self._positions, slice) else self._positions[start:end]
        with self._caller.lock:
            self._caller.require()
            for array, data in zip(self._out[:2], parts[:2], strict=True):
                if array is not None:
                    values = self._precision.widened(np.frombuffer(data, self._precision.dtype))
                    array[where] = values.reshape(-1, array.shape[1])
            if (last_step := self._out[2]) is not None:
                last_step[where] = np.frombuffer(parts[2], "<i8")
        self.num_arrived = end
