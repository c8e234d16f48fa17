"""Rows <-> the bytes of a block.

A block is one stored value of r = rows_per_block rows, everything little-endian:

    offset 0     u16    bytes of a value: 4 for float32, 2 for bfloat16
    offset 2     u16    r
    offset 4     u32    D
    offset 8     u64    the root, a checksum of everything below but the values
    offset 16    u8     bitmap of the rows that were ever written, row 0 in the lowest bit of the first byte;
                        padded with zeros to a multiple of 8 bytes
    then         i64    last_step [r]
    then         f32    weight [r, D], or bf16 if that is the table's dtype (precision.py)
    then         f32    momentum_buffer [r, D], or bf16
    then         u64    checksums of the values of groups of g consecutive rows [⌈r / g⌉]; g is as many rows as have
                        2 KiB of weights, at least 1, and the last group may have fewer

All checksums are XXH3-64, chained: the second part is seeded by the checksum of the first.

    root         the bytes from offset 16 to the weights, seeded by the block and the write that made it; then the
                 checksums of all groups
    a group's    its weights, seeded by 2^16 times the block's number plus the group's; then its momentum buffers

The root and a group's checksum prove the rows of the group, with their last steps: that the disk returns what this
write stored, and not an older version of the block or a block of another table that lay in the same place. Which write
made a block is stored apart from it (see `lmdb_storage`). A fetch verifies the root and the groups that it reads. A
write verifies the whole block, since it copies all of it, and renews the root and the checksums of the groups that it
changes.

Rows of a stored block that were never written hold their initial values. With D = 128 and r = 63 a block takes 65,168
bytes, which with the page header of LMDB's overflow pages is 16 pages of 4 KiB. In bfloat16 so does one of 125 rows.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from weightserver.core import kernel
from weightserver.core.arrays import StoredArray
from weightserver.core.errors import DamagedRecordError
from weightserver.core.initial import initial_rows, quantiles
from weightserver.core.precision import WEIGHT, precision_of
from weightserver.core.spec import TableSpec
from weightserver.core.splitmix import mix_seed

_GROUP_BYTES = 2_048
"""Of the weights of a group of rows, if it has more than one."""
_MAX_RANGES = 8
"""Ranges of damaged rows that a message names."""
_HEADER = struct.Struct("<HHIQ")
_START = struct.Struct("<HHI")
"""The header without the checksum."""
_CHECKSUM = struct.Struct("<Q")
_INT64 = np.dtype("<i8")

Buffer = bytes | bytearray | memoryview
Slots = slice | npt.NDArray[np.int64]
"""Positions of rows in a block, ascending."""


def rows_per_group(spec: TableSpec) -> int:
    """The rows whose values have one checksum."""
    return max(1, _GROUP_BYTES // (spec.value_bytes * spec.dim))


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
        self._start = _START.pack(spec.value_bytes, rows, dim)
        self._bitmap_bytes = -(-rows // 8)
        self._bitmap = slice(_HEADER.size, _HEADER.size + self._bitmap_bytes)
        last_step = _HEADER.size + -(-self._bitmap_bytes // 8) * 8
        weight = last_step + 8 * rows
        row_bytes = spec.value_bytes * dim
        momentum_buffer = weight + row_bytes * rows
        groups = momentum_buffer + row_bytes * rows
        self.offsets = last_step, weight, momentum_buffer
        """Offset of each array in a block, in bytes."""
        self._group_rows, self._groups_at = rows_per_group(spec), groups
        ends = [*range(0, rows, self._group_rows), rows]
        self._groups = [
            (
                slice(weight + row_bytes * first, weight + row_bytes * end),
                slice(momentum_buffer + row_bytes * first, momentum_buffer + row_bytes * end),
            )
            for first, end in pairwise(ends)
        ]
        """Where the weights and the momentum buffers of each group are, in bytes."""
        self.num_bytes = groups + _CHECKSUM.size * len(self._groups)

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
    def compiled(self) -> kernel.Table:
        """What the compiled kernel knows of the table."""
        spec = self._spec
        sizes = spec.rows_per_block, spec.dim, spec.value_bytes, self._group_rows
        seeds = mix_seed(spec.seed), self.precision.mixed_seed
        layout = (*sizes, *self.offsets, self._groups_at, self.num_bytes)
        return (*layout, *seeds, kernel.checksum_address(), spec.init_std, quantiles())

    def num_written(self, buffer: Buffer) -> int:
        """Number of rows that were ever written."""
        return int.from_bytes(buffer[self._bitmap], "little").bit_count()

    def written(self, buffer: Buffer) -> npt.NDArray[np.int64]:
        """The slots of rows that were ever written, ascending, int64 [n]."""
        bitmap = np.frombuffer(buffer[self._bitmap], np.uint8)
        return np.flatnonzero(np.unpackbits(bitmap, count=self._spec.rows_per_block, bitorder="little"))

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

    def seal(self, block: int, write_id: int, buffer: bytearray, slots: Slots | None = None) -> None:
        """Writes the checksums and the header. With `slots`, the block was sealed and intact before, and only these
        rows have changed: other groups keep their checksums."""
        contents = memoryview(buffer)
        for group in self._groups_of(slots):
            _CHECKSUM.pack_into(buffer, self._checksum_at(group), self._group_checksum(block, group, contents))
        buffer[: _START.size] = self._start
        _CHECKSUM.pack_into(buffer, _START.size, self._root_checksum(block, write_id, contents))

    def problem(self, block: int, write_id: int, buffer: Buffer, slots: Slots | None = None) -> str:
        """Describes what is wrong with the bytes of a block that was sealed for that write; empty if nothing is.

        Args:
            slots: looks at the values of these rows and their groups only.
        """
        if len(buffer) != self.num_bytes:
            return f"has {len(buffer)} bytes, not {self.num_bytes}"
        if bytes(buffer[: _START.size]) != self._start:
            value_bytes, rows, dim = _START.unpack_from(buffer)
            return f"holds {rows} rows of {dim} values of {value_bytes} bytes: it belongs to another table"
        contents = memoryview(buffer)
        if self._root_checksum(block, write_id, contents) != _CHECKSUM.unpack_from(buffer, _START.size)[0]:
            return "is damaged (checksum)"
        if damaged := self._damaged_groups(block, contents, slots):
            return f"is damaged (checksum) in {self._rows_of(block, damaged)}"
        return ""

    def _root_checksum(self, block: int, write_id: int, contents: memoryview) -> int:
        """What belongs at offset 8."""
        seed = mix_seed(mix_seed(block) ^ write_id)
        seed = xxhash.xxh3_64_intdigest(contents[_HEADER.size : self.offsets[1]], seed=seed)
        return xxhash.xxh3_64_intdigest(contents[self._groups_at :], seed=seed)

    def _group_checksum(self, block: int, group: int, contents: memoryview) -> int:
        """What belongs at `_checksum_at` the group."""
        weight, momentum_buffer = self._groups[group]
        seed = xxhash.xxh3_64_intdigest(contents[weight], seed=(block << 16) + group)
        return xxhash.xxh3_64_intdigest(contents[momentum_buffer], seed=seed)

    def _checksum_at(self, group: int) -> int:
        return self._groups_at + _CHECKSUM.size * group

    def _groups_of(self, slots: Slots | None) -> Iterable[int]:
        """The groups that these rows are in, or all."""
        if slots is None:
            return range(len(self._groups))
        if isinstance(slots, slice):
            return range(slots.start // self._group_rows, (slots.stop - 1) // self._group_rows + 1)
        return dict.fromkeys((slots // self._group_rows).tolist())

    def _damaged_groups(self, block: int, contents: memoryview, slots: Slots | None) -> list[int]:
        return [
            group
            for group in self._groups_of(slots)
            if self._group_checksum(block, group, contents)
            != _CHECKSUM.unpack_from(contents, self._checksum_at(group))[0]
        ]

    def _rows_of(self, block: int, groups: list[int]) -> str:
        """The rows of these groups, ascending, for messages: neighbouring groups together, and the first ranges only,
        since gRPC refuses to send a long message."""
        first, size = block * self._spec.rows_per_block, self._group_rows
        end_of_block = min(first + self._spec.rows_per_block, self._spec.num_rows)
        ranges = list[tuple[int, int]]()
        for start in (first + group * size for group in groups):
            end = min(start + size, end_of_block)
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            if start < end:
                ranges.append((start, end))
        if not ranges:
            return "rows that the table does not have yet"
        named = [f"{start}..{end - 1}" if end - start > 1 else f"{start}" for start, end in ranges[:_MAX_RANGES]]
        more = len(ranges) - len(named)
        return f"rows {', '.join(named)}" + (f" and {more} more ranges" if more else "")

    def check(self, block: int, write_id: int, buffer: Buffer, slots: Slots | None = None) -> None:
        """Raises DamagedRecordError if there is a problem; see `problem`."""
        if problem := self.problem(block, write_id, buffer, slots):
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

    def copy(self, part: slice, block: memoryview, slots: Slots) -> None:
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

    def store(self, part: slice, block: bytearray, slots: Slots) -> None:
        """Writes the rows of `part` into `slots` of a block's bytes."""
        stored = self._codec.views(block)
        stored.last_step[slots] = self.last_step[part]
        stored.weight[slots] = self.weight[part]
        stored.momentum_buffer[slots] = self.momentum_buffer[part]


def _bytes(array: npt.NDArray[np.int64] | StoredArray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
