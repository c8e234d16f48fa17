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
made a block is stored apart from it (see `lmdb_transaction`). A fetch verifies the root and the groups that it reads. A
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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from weightserver.core import kernel
from weightserver.core.arrays import StoredArray
from weightserver.core.errors import DamagedBlockError
from weightserver.core.initial import initial_rows, quantiles
from weightserver.core.precision import WEIGHT, precision_of
from weightserver.core.sharding import to_ranges
from weightserver.core.spec import TableSpec
from weightserver.core.splitmix import mix_seed

_GROUP_BYTES = 2_048
"""Bytes of the weights of a group of rows, if it has more than one."""
_MAX_RANGES = 8
"""Ranges of damaged rows that a message names."""
_HEADER_BYTES, _START = 16, struct.Struct("<HHI")
"""The header, and what is in it before the root."""
PAGE_BYTES, _PAGE_HEADER_BYTES = 4096, 16
"""LMDB stores a block in whole pages, the first of which begins with a header."""

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
        self._spec, self.dim = spec, spec.dim
        self.precision = precision_of(spec)
        rows, self._group_rows = spec.rows_per_block, rows_per_group(spec)
        ends = [*range(0, rows, self._group_rows), rows]
        self._start = _START.pack(spec.value_bytes, rows, spec.dim)
        fields = np.dtype(
            [
                ("start", "V8"),
                ("root", "<u8"),
                ("written", "u1", (-(-rows // 64) * 8,)),
                ("last_step", "<i8", (rows,)),
                ("weight", self.precision.dtype, (rows, spec.dim)),
                ("momentum_buffer", self.precision.dtype, (rows, spec.dim)),
                ("groups", "<u8", (len(ends) - 1,)),
            ]
        )
        self.num_bytes = fields.itemsize
        places = (fields.fields or {}).items()
        self.offsets = {name: place[1] for name, place in places}
        """Where each of these begins in a block, in bytes."""
        size, starts = spec.value_bytes * spec.dim, (self.offsets["weight"], self.offsets["momentum_buffer"])
        self._groups = [
            [slice(start + size * first, start + size * end) for start in starts] for first, end in pairwise(ends)
        ]
        """Where the weights and the momentum buffers of each group are, in bytes."""
        self._types = {name: (place[0].shape, place[0].base) for name, place in places}

    @property
    def stored_bytes(self) -> int:
        """Bytes that a block takes in LMDB."""
        return PAGE_BYTES * -(-(_PAGE_HEADER_BYTES + self.num_bytes) // PAGE_BYTES)

    def initial(self, block: int) -> bytearray:
        """An unsealed block whose rows hold their initial values; none is marked as written."""
        rows = self._spec.rows_per_block
        buffer = bytearray(self.num_bytes)
        self.views(buffer).weight[:] = self.initial_weight(np.arange(block * rows, (block + 1) * rows, dtype=np.int64))
        return buffer

    def initial_weight(self, rows: npt.NDArray[np.int64]) -> StoredArray:
        """Initial weights of `rows` (int64 [n]) as they are stored, [n, D]."""
        return self.precision.rounded(initial_rows(self._spec, rows), rows, 0, WEIGHT)

    @functools.cached_property
    def compiled(self) -> kernel.Table:
        """What the compiled kernel knows of the table."""
        spec = self._spec
        seeds = mix_seed(spec.seed), self.precision.mixed_seed
        address = kernel.checksum_address()
        return spec.rows_per_block, spec.dim, spec.value_bytes, *seeds, address, spec.init_std, quantiles()

    def num_written(self, buffer: Buffer) -> int:
        """Number of rows that were ever written."""
        return len(self.written(buffer))

    def written(self, buffer: Buffer) -> npt.NDArray[np.int64]:
        """The slots of rows that were ever written, ascending, int64 [n]."""
        return np.flatnonzero(np.unpackbits(self._array("written", buffer), bitorder="little"))

    def mark_written(self, buffer: bytearray, slots: npt.NDArray[np.int64]) -> int:
        """Marks `slots` (distinct, int64 [n]) as written; returns how many are so for the first time."""
        bitmap = self._array("written", buffer)
        bits = np.unpackbits(bitmap, bitorder="little")
        num_new = len(slots) - int(bits[slots].sum())
        bits[slots] = 1
        bitmap[:] = np.packbits(bits, bitorder="little")
        return num_new

    def views(self, buffer: Buffer) -> Block:
        """Arrays over the bytes, without a copy and without a check."""
        return Block(*[self._array(name, buffer) for name in Block._fields])

    def _array(self, name: str, buffer: Buffer) -> npt.NDArray[Any]:
        return np.ndarray(*self._types[name], buffer, self.offsets[name])

    def seal(self, block: int, write_id: int, buffer: bytearray, slots: Slots | None = None) -> None:
        """Writes the checksums and the header. With `slots`, the block was sealed and intact before, and only these
        rows have changed: other groups keep their checksums."""
        checksums, contents = self._array("groups", buffer), memoryview(buffer)
        for group in self._groups_of(slots):
            checksums[group] = self._group_checksum(block, group, contents)
        buffer[: _START.size] = self._start
        self._array("root", buffer)[()] = self._root_checksum(block, write_id, buffer)

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
        if self._root_checksum(block, write_id, buffer) != self._array("root", buffer):
            return "is damaged (checksum)"
        checksums, contents = self._array("groups", buffer).tolist(), memoryview(buffer)
        groups = self._groups_of(slots)
        if damaged := [group for group in groups if self._group_checksum(block, group, contents) != checksums[group]]:
            return f"is damaged (checksum) in {self._rows_of(block, damaged)}"
        return ""

    def _root_checksum(self, block: int, write_id: int, buffer: Buffer) -> int:
        contents, seed = memoryview(buffer), mix_seed(mix_seed(block) ^ write_id)
        seed = xxhash.xxh3_64_intdigest(contents[_HEADER_BYTES : self.offsets["weight"]], seed=seed)
        return xxhash.xxh3_64_intdigest(contents[self.offsets["groups"] :], seed=seed)

    def _group_checksum(self, block: int, group: int, contents: memoryview) -> int:
        weight, momentum_buffer = self._groups[group]
        seed = xxhash.xxh3_64_intdigest(contents[weight], seed=(block << 16) + group)
        return xxhash.xxh3_64_intdigest(contents[momentum_buffer], seed=seed)

    def _groups_of(self, slots: Slots | None) -> Iterable[int]:
        """The groups that these rows are in, or all."""
        if slots is None:
            return range(len(self._groups))
        if isinstance(slots, slice):
            return range(slots.start // self._group_rows, (slots.stop - 1) // self._group_rows + 1)
        return dict.fromkeys((slots // self._group_rows).tolist())

    def _rows_of(self, block: int, groups: list[int]) -> str:
        """The rows of these groups, for messages: the first ranges only, since gRPC refuses to send a long message."""
        slots = np.arange(self._spec.rows_per_block)
        rows = block * self._spec.rows_per_block + slots[np.isin(slots // self._group_rows, groups)]
        ranges = to_ranges(rows[rows < self._spec.num_rows]).tolist()
        if not ranges:
            return "rows that the table does not have yet"
        named = [f"{first}..{first + count - 1}" if count > 1 else f"{first}" for first, count in ranges[:_MAX_RANGES]]
        more = len(ranges) - len(named)
        return f"rows {', '.join(named)}" + (f" and {more} more ranges" if more else "")

    def check(self, block: int, write_id: int, buffer: Buffer, slots: Slots | None = None) -> None:
        """Raises DamagedBlockError if there is a problem; see `problem`."""
        if problem := self.problem(block, write_id, buffer, slots):
            raise DamagedBlockError(
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
        self.last_step = np.zeros(num_rows, np.int64)  # (num_rows,)
        self.weight: StoredArray  # (num_rows, D)
        self.momentum_buffer: StoredArray  # (num_rows, D)
        self.weight, self.momentum_buffer = np.empty((2, num_rows, codec.dim), codec.precision.dtype)

    def copy(self, part: slice, block: Buffer, slots: Slots) -> None:
        """Fills the rows of `part` from the rows in `slots` of a block's bytes."""
        for own, stored in zip(self._arrays(), self._codec.views(block), strict=True):
            if isinstance(slots, slice):
                own[part] = stored[slots]
            else:  # with "clip", which never happens, NumPy takes straight into `out`: half the time of an assignment
                stored.take(slots, 0, own[part], "clip")

    def store(self, part: slice, block: bytearray, slots: Slots) -> None:
        """Writes the rows of `part` into `slots` of a block's bytes."""
        for own, stored in zip(self._arrays(), self._codec.views(block), strict=True):
            stored[slots] = own[part]

    def _arrays(self) -> Block:
        return Block(self.last_step, self.weight, self.momentum_buffer)
