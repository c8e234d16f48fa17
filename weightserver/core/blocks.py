"""Rows <-> the bytes of a block.

A block is one stored value of r = rows_per_block rows, everything little-endian:

    offset 0     u16    format: 2 if no |value| is beyond 2^32, as in any sane training; else 1. In bfloat16 4, else 3
    offset 2     u16    r
    offset 4     u32    D
    offset 8     u64    XXH3-64 of the bytes from offset 16 on, seeded by the block's number, plus 2^63 in formats 2, 4
    offset 16    u8     bitmap of the rows that were ever written, row 0 in the lowest bit of the first byte;
                        padded with zeros to a multiple of 8 bytes
    then         i64    last_step [r]
    then         f32    weight [r, D], or bf16 if that is the table's dtype (precision.py)
    then         f32    momentum_buffer [r, D], or bf16

Rows of a stored block that were never written hold their initial values. Formats 2 and 4 save fetches a check of values
that no sane schedule makes overflow; version 0.1 wrote all blocks in format 1. With D = 128 and r = 63 a block takes
65,040 bytes, which with the page header of LMDB's overflow pages is 16 pages of 4 KiB. In bfloat16 so does one of 125
rows.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from weightserver.core.arrays import Float32Array, StoredArray
from weightserver.core.errors import DamagedRecordError
from weightserver.core.initial import initial_rows, source_of
from weightserver.core.kernel import Initial
from weightserver.core.precision import WEIGHT, precision_of
from weightserver.core.spec import TableSpec

SMALL = 2.0**32
"""The largest |value| of blocks of small values."""
_MOST_STANDARD_DEVIATIONS = 10
"""No initial weight lies beyond so many."""
_FORMATS = {"float32": (1, 2), "bfloat16": (3, 4)}
"""Formats of any and of small values, by dtype."""
_HEADER = struct.Struct("<HHIQ")
_START = struct.Struct("<HHI")
"""The header without the checksum."""
_CHECKED_FROM = _HEADER.size
_INT64 = np.dtype("<i8")

Buffer = bytes | bytearray | memoryview


class Block(NamedTuple):
    """Views into a block's bytes; writable where the bytes are."""

    last_step: npt.NDArray[np.int64]  # (r,)
    weight: StoredArray  # (r, D)
    momentum_buffer: StoredArray  # (r, D)


class BlockCodec:
    """Makes, reads and seals the blocks of one table."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        rows, dim = spec.rows_per_block, spec.dim
        self.dim = dim
        self.precision = precision_of(spec)
        self._any_values, self._small_values = _FORMATS[spec.dtype]
        self._seeds = {_START.pack(number, rows, dim): self._seed(number) for number in _FORMATS[spec.dtype]}
        """By the first bytes of a block of this table, what the seed of its checksum is added to."""
        self._bitmap_bytes = -(-rows // 8)
        self._bitmap = slice(_HEADER.size, _HEADER.size + self._bitmap_bytes)
        last_step = _HEADER.size + -(-self._bitmap_bytes // 8) * 8
        weight = last_step + 8 * rows
        momentum_buffer = weight + spec.value_bytes * rows * dim
        self.offsets = last_step, weight, momentum_buffer
        """Offset of each array in a block, in bytes."""
        self.num_bytes = momentum_buffer + spec.value_bytes * rows * dim
        self.layout = (rows, dim, spec.value_bytes, *self.offsets, self.num_bytes, *_FORMATS[spec.dtype])
        """The same for the compiled kernel."""

    def initial(self, block: int) -> bytearray:
        """An unsealed block whose rows hold their initial values; none is marked as written."""
        rows = self._spec.rows_per_block
        buffer = bytearray(self.num_bytes)
        self.views(buffer).weight[:] = self.initial_weight(np.arange(block * rows, (block + 1) * rows, dtype=np.int64))
        return buffer

    def initial_weight(self, rows: npt.NDArray[np.int64]) -> StoredArray:
        """Initial weights of `rows` (int64 [n]) as they are stored, [n, D]."""
        return self.precision.rounded(initial_rows(self._spec, rows), rows, 0, WEIGHT)

    def array_bytes(self, num_rows: int) -> tuple[int, int, int]:
        """Bytes of so many rows' weights, momentum buffers and last steps."""
        values = self._spec.value_bytes * self.dim * num_rows
        return values, values, 8 * num_rows

    @functools.cached_property
    def source(self) -> Initial:
        """What the compiled kernel draws initial weights from."""
        return source_of(self._spec)

    @property
    def initial_are_small(self) -> bool:
        """Whether no initial weight is beyond ±SMALL."""
        return _MOST_STANDARD_DEVIATIONS * self._spec.init_std <= SMALL

    def num_written(self, buffer: Buffer) -> int:
        """Number of rows that were ever written."""
        return int.from_bytes(buffer[self._bitmap], "little").bit_count()

    def written(self, buffer: Buffer) -> npt.NDArray[np.int64]:
        """The slots of rows that were ever written, ascending, int64 [n]."""
        bitmap = np.frombuffer(buffer[self._bitmap], np.uint8)
        return np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))

    def views(self, buffer: Buffer) -> Block:
        """Arrays over the bytes, without a copy and without a check."""
        rows, dim = self._spec.rows_per_block, self._spec.dim
        last_step, weight, momentum_buffer = self.offsets
        return Block(
            np.ndarray(rows, _INT64, buffer, last_step),
            np.ndarray((rows, dim), self.precision.dtype, buffer, weight),
            np.ndarray((rows, dim), self.precision.dtype, buffer, momentum_buffer),
        )

    def mark_written(self, buffer: bytearray, slots: npt.NDArray[np.int64]) -> int:
        """Marks `slots` (distinct, int64 [n]) as written; returns how many are so for the first time."""
        marked = np.zeros(self._spec.rows_per_block, bool)
        marked[slots] = True
        before = int.from_bytes(buffer[self._bitmap], "little")
        after = before | int.from_bytes(np.packbits(marked, bitorder="little").tobytes(), "little")
        buffer[self._bitmap] = after.to_bytes(self._bitmap_bytes, "little")
        return (before ^ after).bit_count()

    def seal(self, block: int, buffer: bytearray) -> None:
        """Writes the header, with the checksum of the block's contents."""
        num_values = 2 * self._spec.rows_per_block * self.dim
        values = np.ndarray(num_values, self.precision.dtype, buffer, self.offsets[1])
        block_format = self._small_values if self.precision.all_within(SMALL, values) else self._any_values
        seed = block + self._seed(block_format)
        checksum = xxhash.xxh3_64_intdigest(memoryview(buffer)[_CHECKED_FROM:], seed=seed)
        _HEADER.pack_into(buffer, 0, block_format, self._spec.rows_per_block, self.dim, checksum)

    def is_small(self, buffer: Buffer) -> bool:
        """Whether no |value| of a sealed block is beyond SMALL."""
        return buffer[0] == self._small_values

    def problem(self, block: int, buffer: Buffer) -> str:
        """Describes what is wrong with the bytes of a sealed block of this table; empty if nothing is."""
        if self._is_intact(block, buffer):
            return ""
        if len(buffer) != self.num_bytes:
            return f"has {len(buffer)} bytes, not {self.num_bytes}"
        block_format, rows, dim, _ = _HEADER.unpack_from(buffer)
        if block_format not in (self._any_values, self._small_values):
            readable = f"{self._any_values} and {self._small_values}"
            return f"has format {block_format}, this version reads {readable} in tables of {self._spec.dtype}"
        if (rows, dim) != (self._spec.rows_per_block, self._spec.dim):
            return f"holds {rows} rows of {dim}: it belongs to another table"
        return "is damaged (checksum)"

    def _is_intact(self, block: int, buffer: Buffer) -> bool:
        seed = self._seeds.get(bytes(buffer[: _START.size]))
        if seed is None or len(buffer) != self.num_bytes:
            return False
        checksum = xxhash.xxh3_64_intdigest(memoryview(buffer)[_CHECKED_FROM:], seed=block + seed)
        return checksum == int.from_bytes(buffer[_START.size : _CHECKED_FROM], "little")

    def _seed(self, block_format: int) -> int:
        return 1 << 63 if block_format == self._small_values else 0

    def check(self, block: int, buffer: Buffer) -> None:
        """Raises DamagedRecordError if there is a problem."""
        if problem := self.problem(block, buffer):
            raise DamagedRecordError(
                f"{self.name(block)} {problem}: 'weightserver verify' shows which checkpoints still have it"
            )

    def name(self, block: int) -> str:
        """The block and its rows, for messages."""
        first = block * self._spec.rows_per_block
        return f"block {block} (rows {first}..{min(first + self._spec.rows_per_block, self._spec.num_rows) - 1})"


class RowBuffer:
    """Rows copied out of blocks, as they are stored."""

    def __init__(self, codec: BlockCodec, num_rows: int) -> None:
        self._codec = codec
        self.last_step = np.zeros(num_rows, _INT64)  # (num_rows,)
        self.weight: StoredArray  # (num_rows, D)
        self.momentum_buffer: StoredArray  # (num_rows, D)
        self.weight, self.momentum_buffer = np.empty((2, num_rows, codec.dim), codec.precision.dtype)
        self._bytes = _bytes(self.last_step), _bytes(self.weight), _bytes(self.momentum_buffer)
        self._row_bytes = codec.precision.dtype.itemsize * codec.dim

    def copy(self, part: slice, block: memoryview, slots: slice | npt.NDArray[np.int64]) -> None:
        """Fills the rows of `part` from the rows in `slots` of a block's bytes."""
        if isinstance(slots, slice):  # neighbours, as bytes: half the time of NumPy's views
            size, start, stop = self._row_bytes, part.start, part.stop
            last_step_at, weight_at, momentum_at = self._codec.offsets
            last_step, weight, momentum_buffer = self._bytes
            last_step[8 * start : 8 * stop] = block[last_step_at + 8 * slots.start : last_step_at + 8 * slots.stop]
            first, num_bytes = size * slots.start, size * (stop - start)
            start *= size
            stop *= size
            weight[start:stop] = block[weight_at + first : weight_at + first + num_bytes]
            momentum_buffer[start:stop] = block[momentum_at + first : momentum_at + first + num_bytes]
        else:
            # With "clip", which never happens, NumPy takes straight into `out`: half the time of an assignment.
            stored = self._codec.views(block)
            stored.last_step.take(slots, 0, self.last_step[part], "clip")
            stored.weight.take(slots, 0, self.weight[part], "clip")
            stored.momentum_buffer.take(slots, 0, self.momentum_buffer[part], "clip")

    def copy_weight(self, part: slice, block: memoryview, slots: slice | npt.NDArray[np.int64]) -> None:
        """Fills only the weights of the rows of `part`."""
        self.weight[part] = self._codec.views(block).weight[slots]

    def store(self, part: slice, block: bytearray, slots: slice | npt.NDArray[np.int64]) -> None:
        """Writes the rows of `part` into `slots` of a block's bytes."""
        stored = self._codec.views(block)
        stored.last_step[slots] = self.last_step[part]
        stored.weight[slots] = self.weight[part]
        stored.momentum_buffer[slots] = self.momentum_buffer[part]

    def widened_weight(self) -> Float32Array:
        """The weights as float32, (num_rows, D)."""
        return self._codec.precision.widened(self.weight)


def _bytes(array: npt.NDArray[np.int64] | StoredArray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
