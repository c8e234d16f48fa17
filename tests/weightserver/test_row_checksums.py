"""Checksums of blocks: what a fetch proves, and what a write beside damage does; by NumPy and by the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.helpers.kernels_built import NUMPY, computing_with
from tests.helpers.memory_storage import MemoryStorage
from tests.helpers.schedules import naming
from weightserver.core import kernel
from weightserver.core.arrays import Int64Array
from weightserver.core.blocks import BlockCodec, rows_per_group
from weightserver.core.errors import DamagedBlockError
from weightserver.core.spec import TableSpec
from weightserver.core.splitmix import mix_seed
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader

SMALL = TableSpec(num_rows=100, dim=64, rows_per_block=20)
"""Blocks of groups of 8, 8 and 4 rows, in bfloat16 of 16 and 4."""
LARGE = TableSpec(num_rows=1_000, dim=128)
"""Blocks of 16 groups, the last of 3 rows."""
BLOCK, WRITE_ID, STEP = 3, 2**63 + 11, 10
ALL = slice(0, None)
SESSION_ID = b"o" * 16


@pytest.fixture(params=["numpy", "compiled"])
def computing(request: pytest.FixtureRequest, compiled: kernel.Kernel) -> Iterator[None]:
    """Once by NumPy, once by the kernel."""
    with computing_with(compiled if request.param == "compiled" else NUMPY):
        yield


def in_both(spec: TableSpec) -> list[Any]:
    return [pytest.param(replace(spec, dtype=dtype), id=f"{dtype}-{spec.dim}") for dtype in ("float32", "bfloat16")]


def offsets(spec: TableSpec) -> tuple[int, int, int]:
    """Of the weights, the momentum buffers and the checksums of groups in a block."""
    found = BlockCodec(spec).offsets
    return found["weight"], found["momentum_buffer"], found["groups"]


def groups(spec: TableSpec) -> list[Int64Array]:
    """The slots of each group."""
    slots = np.arange(spec.rows_per_block)
    return np.split(slots, slots[rows_per_group(spec) :: rows_per_group(spec)])


def sealed(spec: TableSpec, block: int = BLOCK) -> bytearray:
    """A block of random rows, most of which were written."""
    codec, generator = BlockCodec(spec), np.random.default_rng(block)
    buffer, rows = codec.initial(block), spec.rows_per_block
    last_step, weight, momentum_buffer = codec.views(buffer)
    last_step[:] = generator.integers(1, 9, rows)
    for number, array in enumerate((weight, momentum_buffer)):
        values = generator.standard_normal((rows, spec.dim)).astype(np.float32)
        array[:] = codec.precision.rounded(values, np.arange(rows), 0, number)
    codec.mark_written(buffer, np.flatnonzero(generator.random(rows) < 0.9))
    codec.seal(block, WRITE_ID, buffer)
    return buffer


class Stored:
    """A shard in memory that holds one block."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec, self.codec, self.storage, self.sequence = spec, BlockCodec(spec), MemoryStorage(), 0
        self.shard = Shard(self.storage, shard=0, num_shards=1)
        with self.shard.batch() as batch:
            batch.create_table(spec)
        with self.shard.batch() as batch:
            batch.open_session("run", 1, SESSION_ID)
        self.content = sealed(spec)

    @property
    def write_id(self) -> int:
        """Names the write that stored the block."""
        return int(self.storage.contents["versions"].setdefault((BLOCK, 0), WRITE_ID))

    @property
    def content(self) -> bytes | bytearray:
        return bytes(self.storage.contents["blocks"][BLOCK, self.write_id])

    @content.setter
    def content(self, stored: bytes | bytearray) -> None:
        self.storage.contents["blocks"][BLOCK, self.write_id] = bytes(stored)

    def rows(self, slots: Any) -> Int64Array:
        return BLOCK * self.spec.rows_per_block + np.arange(self.spec.rows_per_block)[slots]

    def fetch(self, slots: Any) -> bytes:
        ((_, message),) = self.shard.fetch(self.rows(slots), step=None, state=True)
        return message

    def damaged(self, slots: Any) -> str:
        """What a fetch says; empty if it answers."""
        try:
            self.fetch(slots)
        except DamagedBlockError as error:
            return str(error)
        return ""

    def update(self, slots: Any, *, raw: bool = False) -> None:
        """Pushes gradients, or writes raw rows."""
        rows = self.rows(slots)
        values = np.full((len(rows), self.spec.dim), 0x3F80, self.codec.precision.dtype)
        self.sequence += 1
        header = WriteHeader(1, SESSION_ID, b"w" * 16, self.sequence, STEP, naming(np.full(200, 0.1)))
        with self.shard.batch() as batch:
            if raw:
                batch.write_state(header, rows, values, values, np.full(len(rows), STEP))
            else:
                batch.push_gradients(header, rows, values)


@pytest.mark.parametrize("spec", [*in_both(SMALL), *in_both(LARGE), *in_both(replace(SMALL, dim=600))])
def test_what_each_checksum_covers(spec: TableSpec) -> None:
    """As the docstring of blocks.py says."""
    block, (weight, momentum_buffer, end), size = bytes(sealed(spec)), offsets(spec), spec.value_bytes * spec.dim
    assert rows_per_group(spec) == max(1, 2_048 // size)
    found = np.frombuffer(block, "<u8", offset=end).tolist()
    assert len(found) == -(-spec.rows_per_block // rows_per_group(spec))
    for group, slots in enumerate(groups(spec)):
        first, stop = size * int(slots[0]), size * (int(slots[-1]) + 1)
        expected = xxhash.xxh3_64_intdigest(block[weight + first : weight + stop], seed=(BLOCK << 16) + group)
        expected = xxhash.xxh3_64_intdigest(block[momentum_buffer + first : momentum_buffer + stop], seed=expected)
        assert found[group] == expected
    assert block[0] == spec.value_bytes
    root = xxhash.xxh3_64_intdigest(block[16:weight], seed=mix_seed(mix_seed(BLOCK) ^ WRITE_ID))
    assert int.from_bytes(block[8:16], "little") == xxhash.xxh3_64_intdigest(block[end:], seed=root)


def check_flips(spec: TableSpec, positions: Any) -> None:
    """Flips bits of one byte after the other, and fetches each group's rows."""
    stored, whole, generator = Stored(spec), sealed(spec), np.random.default_rng(0)
    name, before = stored.codec.name(BLOCK), [stored.fetch(slots) for slots in groups(spec)]
    weight, _, end = offsets(spec)
    for position in positions:
        changed = whole.copy()
        changed[position] ^= int(generator.integers(1, 256))
        stored.content = changed
        slot = (position - weight) // (spec.value_bytes * spec.dim) % spec.rows_per_block
        hurt = slot // rows_per_group(spec) if weight <= position < end else None
        assert stored.codec.problem(BLOCK, WRITE_ID, changed), position
        for group, slots in enumerate(groups(spec)):
            said = stored.damaged(slots)
            if hurt is None:
                assert said.startswith(name), (position, group)
            elif hurt == group:
                first, last = stored.rows(slots)[[0, -1]]
                assert f"{name} is damaged (checksum) in rows {first}..{last}: " in said, position
            else:
                assert stored.fetch(slots) == before[group], position


@pytest.mark.guard
@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", in_both(replace(SMALL, num_rows=500, dim=20, rows_per_block=30)))
def test_every_flipped_byte_concerns_its_rows_alone(spec: TableSpec) -> None:
    check_flips(spec, range(BlockCodec(spec).num_bytes))


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", [*in_both(SMALL), *in_both(LARGE)])
def test_some_flipped_bytes_concern_their_rows_alone(spec: TableSpec) -> None:
    size, edges = BlockCodec(spec).num_bytes, [0, 1, 2, 4, 8, 15, 16]
    for at in offsets(spec):
        edges += [at - 1, at]
    check_flips(spec, [*edges, size - 1, *np.random.default_rng(1).integers(0, size, 40).tolist()])


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", in_both(SMALL))
def test_exchanged_parts_are_noticed(spec: TableSpec) -> None:
    """Groups of one block, with or without their checksums; the same group of two blocks; whole blocks."""
    weight, momentum_buffer, end = offsets(spec)
    one, other, size = sealed(spec), sealed(spec, BLOCK + 1), spec.value_bytes * spec.dim * 4
    last = (spec.rows_per_block // 4 - 1) * size  # the last four rows are a group
    stored, first_rows, last_rows = Stored(spec), groups(spec)[0], groups(spec)[-1]

    def exchanged(*places: tuple[int, int, int]) -> bytearray:
        changed = one.copy()
        for at, to, length in places:
            changed[at : at + length], changed[to : to + length] = one[to : to + length], one[at : at + length]
        return changed

    values = [(at, at + last, size) for at in (weight, momentum_buffer)]
    foreign_group = one[:weight] + other[weight : weight + last] + one[weight + last :]
    for changed, slots, message in [
        (exchanged(*values), first_rows, "in rows"),
        (exchanged(*values), last_rows, "in rows"),
        (exchanged((weight, momentum_buffer, momentum_buffer - weight)), last_rows, "in rows"),
        (exchanged(*values, (end, len(one) - 8, 8)), first_rows, "is damaged (checksum): "),
        (foreign_group, first_rows, "in rows"),
        (one[:weight] + other[weight:], last_rows, "is damaged (checksum): "),
        (one[:end] + other[end:], last_rows, "is damaged (checksum): "),
        (other, last_rows, "is damaged (checksum): "),
    ]:
        stored.content = changed
        assert message in stored.damaged(slots)
    stored.content = foreign_group
    assert not stored.damaged(last_rows)


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", in_both(SMALL))
def test_a_block_of_another_write_is_refused(spec: TableSpec) -> None:
    """All of it, or any run of its 512-byte pieces: also the same rows, stored once more."""
    stored = Stored(spec)
    older = stored.content
    stored.update(ALL)
    assert stored.write_id != WRITE_ID
    assert not stored.damaged(ALL)
    newer = stored.content
    again = bytearray(newer)
    stored.codec.seal(BLOCK, WRITE_ID, again)
    for wrong in (older, again):
        stored.content = wrong
        assert "is damaged (checksum)" in stored.damaged(ALL)
        with pytest.raises(DamagedBlockError):
            stored.update([0])
    pieces = range(0, len(newer), 512)
    for first in pieces:
        for last in pieces[first // 512 :]:
            stored.content = mixed = newer[:first] + older[first : last + 512] + newer[last + 512 :]
            assert bool(stored.damaged(ALL)) == (mixed != newer), (first, last)


@pytest.mark.usefixtures("computing")
def test_a_block_of_another_length_is_refused() -> None:
    stored, whole = Stored(SMALL), sealed(SMALL)
    for changed in (b"", whole[:7], whole[:-8], whole + b"x"):
        stored.content = changed
        assert f"has {len(changed)} bytes, not {len(whole)}: " in stored.damaged([0])


def test_messages_name_all_damaged_rows_of_the_table_in_few_ranges() -> None:
    """gRPC sends messages of at most 8 KiB with certainty."""
    codec, block = BlockCodec(LARGE), sealed(LARGE)
    for slot in (9, 12, 62):
        codec.views(block).momentum_buffer[slot, 5] += 1
    assert codec.problem(BLOCK, WRITE_ID, block) == "is damaged (checksum) in rows 197..204, 249..251"
    assert codec.problem(BLOCK, WRITE_ID, block, slice(8, 9)) == "is damaged (checksum) in rows 197..200"
    assert codec.problem(BLOCK, WRITE_ID, block, np.array([0, 7, 62])) == "is damaged (checksum) in rows 249..251"
    assert codec.problem(BLOCK, WRITE_ID, block, slice(0, 8)) == ""
    codec = BlockCodec(TableSpec(num_rows=2_100, dim=512, rows_per_block=2_048))
    for number, changed, slots, rows in [
        (0, slice(0, None, 2), None, "rows 0, 2, 4, 6, 8, 10, 12, 14 and 1016 more ranges"),
        (1, slice(50, 60), None, "rows 2098..2099"),
        (1, slice(50, 60), slice(52, 60), "rows that the table does not have yet"),
    ]:
        block = codec.initial(number)
        codec.seal(number, 1, block)
        codec.views(block).weight[changed] += 1
        assert codec.problem(number, 1, block, slots) == f"is damaged (checksum) in {rows}"


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("spec", in_both(SMALL))
def test_a_write_beside_damage_is_refused(spec: TableSpec, raw: bool) -> None:
    """Or what was read wrongly once, and is right on the disk, would be stored in its place."""
    stored, damaged, hurt, intact = Stored(spec), sealed(spec), groups(spec)[-1], groups(spec)[0]
    stored.codec.views(damaged).weight[hurt[1], 3] += 1
    stored.content = damaged
    first, last = stored.rows(hurt)[[0, -1]]
    for refused in (intact[1:3], hurt[:1], ALL):
        with pytest.raises(DamagedBlockError, match=rf"in rows {first}\.\.{last}: "):
            stored.update(refused, raw=raw)
    assert stored.content == damaged
    assert not stored.damaged(intact)
