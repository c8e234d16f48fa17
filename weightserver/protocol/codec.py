"""The codec that client and server share: protobuf messages <-> arrays. Numbers in `bytes` fields are little-endian.

Fetch answers are encoded by hand, because they are megabytes and each copy of them costs: a FetchResponse has three
length-delimited fields, and joining their tags, lengths and buffers makes the same bytes as the generated class (a test
compares them) with one copy instead of three. Decoding makes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from weightserver.core.arrays import Float32Array, Int64Array, StoredArray, all_finite
from weightserver.core.errors import InvalidRequestError
from weightserver.core.sharding import from_ranges, to_ranges
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb

MAX_MESSAGE_BYTES = 64 << 20
"""The largest message that either side accepts; bulk data is sent in messages of about `CHUNK_BYTES`."""
CHUNK_BYTES = 1 << 20
KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS = 10, 5
"""For how long either side hears nothing during a call before it pings the other, and waits for the answer."""
VERSION_KEY, ACKNOWLEDGED_KEY, MARK_KEY = (f"weightserver-{name}" for name in ("version", "acknowledged", "mark"))
"""Keys of the metadata of calls and answers; see the contract."""
SHARD_KEY = "weightserver-shard"
"""Key of the metadata in which a client names the shard that its call is for, as `shard/num_shards`."""
TABLE_KEY = "weightserver-table"
"""Key of the metadata in which a client that knows its table names it: its identity, in hexadecimal digits."""
ONE_MESSAGE_KEY = "weightserver-one-message"
"""Key of the metadata in which a client says that its fetch asks for at most CHUNK_BYTES of weights. Their answer is
one message, which the shard then sends together with the status; older shards overlook the key."""
OWN_TIME_KEY = "weightserver-own-us"
"""Key of the trailing metadata in which a shard says how long a call took it, without waiting for the caller's messages
or until the caller took its own, in microseconds."""
NOT_READY_KEY = "weightserver-not-ready-bin"
"""Key of the trailing metadata of a health check in which a shard says why it is not ready, in UTF-8."""
MAX_ROWS = 1 << 19
"""Number of rows that one fetch, or one message of a write, may name: 4 MiB if they are scattered."""
MAX_WRITE_ROWS = 1 << 24
"""Number of rows in one push or state write."""
MAX_REQUEST_BYTES = 8 * MAX_ROWS + (1 << 20)
"""The largest message that a shard accepts: that of a fetch of MAX_ROWS scattered rows."""
MAX_WRITE_BYTES = 1 << 30
"""Bytes of rows and values in one push or state write. The client splits none: a write is atomic on a shard."""
MAX_NAME_CHARACTERS = 256
"""Length of a run's name: error messages quote it, and gRPC sends those in headers of at most 8 KiB."""
_DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
"""By their number in the contract's RowDtype."""
_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}


def spec_to_proto(spec: TableSpec) -> pb.TableSpec:
    return pb.TableSpec(
        **vars(spec)
        | {
            "correction": bool(spec.correction),
            "single_rate": spec.correction == "paper",
            "dtype": _DTYPES.index(spec.dtype),
        }
    )


def table_number(spec: TableSpec, identity: bytes) -> int:
    """Names a table in requests, whatever its size, never 0: XXH3-64 of the spec's other values in the order of its
    fields, and of its identity. A reshard keeps the identity, but may change the rows of each shard."""
    values = [value for name, value in vars(spec).items() if name != "num_rows"]
    return xxhash.xxh3_64_intdigest(repr(values).encode() + identity) or 1


def spec_from_proto(spec: pb.TableSpec) -> TableSpec:
    """Raises InvalidRequestError if the spec is invalid."""
    named = {field.name: getattr(spec, field.name) for field in pb.TableSpec.DESCRIPTOR.fields}
    if named.pop("single_rate"):
        if not spec.correction:
            raise InvalidRequestError("single_rate is a kind of correction: set correction too")
        named["correction"] = "paper"
    if not 0 <= named["dtype"] < len(_DTYPES):
        raise InvalidRequestError(
            f"dtype {named['dtype']} of the table is unknown: is the other side of a newer version?"
        )
    named["dtype"] = _DTYPES[named["dtype"]]
    try:
        return TableSpec(**named)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def rows_to_proto(rows: Int64Array) -> pb.Rows:
    """Encodes strictly increasing rows (int64 [n]), as ids or as ranges, whichever is shorter."""
    ranges = to_ranges(rows)
    if 2 * len(ranges) < len(rows):
        return pb.Rows(ranges=to_bytes(ranges))
    return pb.Rows(ids=to_bytes(rows))


@dataclass(frozen=True)
class NamedRows:
    """The rows that a message names, counted before they are expanded: short ranges can name many rows."""

    count: int
    _values: Int64Array
    """Ids, or pairs of first row and count."""
    _are_ranges: bool

    def array(self) -> Int64Array:
        """int64 [count], which may not exist in the table."""
        return from_ranges(self._values.reshape(-1, 2)) if self._are_ranges else self._values


def named_rows(rows: pb.Rows) -> NamedRows:
    """Reads the rows that a message names.

    Raises:
        InvalidRequestError: the bytes do not encode rows, or more than MAX_ROWS.
    """
    if rows.ids and rows.ranges:
        raise InvalidRequestError("rows are given as ids or as ranges, not both")
    if rows.ids:
        if len(rows.ids) > 8 * MAX_ROWS:
            raise InvalidRequestError(f"one message may name at most {MAX_ROWS} rows: split it")
        ids = int64_from_bytes(rows.ids, "ids")
        return NamedRows(len(ids), ids, False)
    ranges = int64_from_bytes(rows.ranges, "ranges")
    if len(ranges) % 2:
        raise InvalidRequestError("ranges must be pairs of first row and count")
    counts = ranges[1::2]
    if ((counts < 1) | (counts > MAX_ROWS)).any() or int(counts.sum()) > MAX_ROWS:
        raise InvalidRequestError(
            f"ranges must have positive counts, and one message may name at most {MAX_ROWS} rows: split it"
        )
    return NamedRows(int(counts.sum()), ranges, True)


def to_bytes(array: StoredArray | Int64Array) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def int64_from_bytes(data: bytes, name: str) -> Int64Array:
    """int64 [n], read-only. Raises InvalidRequestError."""
    if len(data) % 8:
        raise InvalidRequestError(f"{name} has {len(data)} bytes, not a multiple of 8")
    return np.frombuffer(data, "<i8")


def float32_from_bytes(data: bytes, name: str) -> Float32Array:
    """float32 [n], read-only, finite. Raises InvalidRequestError."""
    if len(data) % 4:
        raise InvalidRequestError(f"{name} has {len(data)} bytes, not a multiple of 4")
    values = np.frombuffer(data, "<f4")
    if not all_finite(values):
        raise InvalidRequestError(f"{name} holds NaN or infinite values: nothing was written")
    return values


def encode_fetch_response(
    weight: StoredArray, momentum_buffer: StoredArray | None, last_step: Int64Array | None
) -> bytes:
    """A serialized FetchResponse."""
    parts: list[bytes | memoryview] = []
    for number, array in enumerate((weight, momentum_buffer, last_step), start=1):
        if array is not None and array.size:
            data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
            parts += [field_head(number, len(data)), data]
    return b"".join(parts)


def field_head(number: int, num_bytes: int) -> bytes:
    """What precedes a field of a FetchResponse (1 weight, 2 momentum buffer, 3 last step) of `num_bytes`."""
    return bytes([number << 3 | _LENGTH_DELIMITED]) + _varint(num_bytes)


def decode_fetch_response(message: bytes) -> tuple[memoryview, memoryview, memoryview]:
    """weight, momentum_buffer and last_step of a serialized FetchResponse, empty where absent, without a copy.

    Other fields, which a newer shard may send, are skipped.

    Raises:
        InvalidRequestError: the bytes are not such a message.
    """
    view, position = memoryview(message), 0
    fields = dict.fromkeys((1, 2, 3), view[:0])
    try:
        while position < len(view):
            tag, position = _read_varint(view, position)
            kind, length = tag & 7, 0
            if kind == _VARINT:
                _, position = _read_varint(view, position)
            elif kind == _LENGTH_DELIMITED:
                length, position = _read_varint(view, position)
                fields[tag >> 3] = view[position : position + length]
            elif kind in _FIXED_BYTES:
                length = _FIXED_BYTES[kind]
            else:
                raise IndexError
            position += length
            if position > len(view):
                raise IndexError
    except IndexError:
        raise InvalidRequestError(
            "the answer is not a FetchResponse: is this a weight server of the same version?"
        ) from None
    return fields[1], fields[2], fields[3]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
