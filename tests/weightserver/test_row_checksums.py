"""Checksums of blocks: what a fetch proves, and what a write renews; by NumPy and by the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.helpers.kernels_built import NUMPY, build, computing_with, load
from tests.helpers.memory_storage import MemoryStorage
from tests.helpers.schedules import naming
from weightserver.core import kernel
from weightserver.core.arrays import Int64Array
from weightserver.core.blocks import BlockCodec, rows_per_group
from weightserver.core.errors import DamagedRecordError
from weightserver.core.spec import TableSpec
from weightserver.core.splitmix import mix_seed
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader

SMALL = TableSpec(num_rows=100, dim=64, rows_per_block=20)
"""Blocks of groups of 8, 8 and 4 rows, in bfloat16 of 16 and 4."""
LARGE = TableSpec(num_rows=1_000, dim=128)
"""Blocks of 16 groups, the last of 3 rows."""
BLOCK = 3
ALL = slice(0, None)
WRITE_ID = 2**63 + 11
SESSION_ID = b"o" * 16
RATES = naming(np.full(200, 0.1))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> kernel.Kernel:
    return load(build(tmp_path_factory.mktemp("kernel")))


@pytest.fixture(params=["numpy", "compiled"])
def computing(request: pytest.FixtureRequest, compiled: kernel.Kernel) -> Iterator[None]:
    """Once by NumPy, once by the kernel."""
    with computing_with(compiled if request.param == "compiled" else NUMPY):
        yield


def in_both(spec: TableSpec) -> list[TableSpec]:
    return [spec, replace(spec, dtype="bfloat16")]


def named(spec: TableSpec) -> str:
    return f"{spec.dtype}, {spec.rows_per_block} rows of {spec.dim}"


def offsets(spec: TableSpec) -> tuple[int, int]:
    """Of the weights and the momentum buffers in a block."""
    found = BlockCodec(spec).offsets
    return found["weight"], found["momentum_buffer"]


def groups(spec: TableSpec) -> list[Int64Array]:
    """The slots of each group."""
    slots = np.arange(spec.rows_per_block)
    return np.split(slots, slots[rows_per_group(spec) :: rows_per_group(spec)])


def group_at(spec: TableSpec, position: int) -> int | None:
    """The group whose values have this byte; None if all rows depend on it."""
    weight, momentum_buffer = offsets(spec)
    row_bytes = spec.value_bytes * spec.dim
    row = (position - weight) // row_bytes % spec.rows_per_block
    end = momentum_buffer + spec.rows_per_block * row_bytes
    return int(row) // rows_per_group(spec) if weight <= position < end else None


def sealed(spec: TableSpec, block: int = BLOCK, seed: int = 0) -> bytearray:
    """A block of random rows, most of which were written."""
    codec, generator = BlockCodec(spec), np.random.default_rng((seed, block))
    buffer, rows = codec.initial(block), spec.rows_per_block
    last_step, weight, momentum_buffer = codec.views(buffer)
    last_step[:] = generator.integers(1, 9, rows)
    for number, array in enumerate((weight, momentum_buffer)):
        values = generator.standard_normal((rows, spec.dim)).astype(np.float32)
        array[:] = codec.precision.rounded(values, np.arange(rows), 0, number)
    codec.mark_written(buffer, np.flatnonzero(generator.random(rows) < 0.9))
    codec.seal(block, WRITE_ID, buffer)
    return buffer


@dataclass
class Stored:
    """A shard in memory that holds some blocks."""

    spec: TableSpec
    blocks: dict[int, bytes]

    def __post_init__(self) -> None:
        self.storage = MemoryStorage()
        self.shard = Shard(self.storage, shard=0, num_shards=1)
        self.sequence, self.clock = 0, 10
        with self.shard.batch() as batch:
            self.shard.create_table(batch, self.spec)
        with self.shard.batch() as batch:
            self.shard.open_session(batch, "run", 1, SESSION_ID)
        for number, block in self.blocks.items():
            self[number] = block

    def write_id(self, block: int) -> int:
        """Names the write that stored the block."""
        return int(self.storage.contents["versions"].setdefault((block, 0), WRITE_ID))

    def __getitem__(self, block: int) -> bytes:
        return bytes(self.storage.contents["blocks"][block, self.write_id(block)])

    def __setitem__(self, block: int, stored: bytes | bytearray) -> None:
        self.storage.contents["blocks"][block, self.write_id(block)] = bytes(stored)

    def rows(self, slots: Any, block: int = BLOCK) -> Int64Array:
        return block * self.spec.rows_per_block + np.arange(self.spec.rows_per_block)[slots]

    def fetch(self, slots: Any, block: int = BLOCK) -> bytes:
        ((_, message),) = self.shard.fetch(self.rows(slots, block), step=None, state=True)
        return message

    def damaged(self, slots: Any, block: int = BLOCK) -> str:
        """What a fetch says; empty if it answers."""
        try:
            self.fetch(slots, block)
        except DamagedRecordError as error:
            return str(error)
        return ""

    def header(self) -> WriteHeader:
        self.sequence += 1
        return WriteHeader(1, SESSION_ID, b"w" * 16, self.sequence, self.clock, RATES)

    def push(self, slots: Any, block: int = BLOCK, *, value: float = 1.0) -> None:
        """Each push is a step."""
        rows = self.rows(slots, block)
        precision = BlockCodec(self.spec).precision
        gradients = precision.rounded(np.full((len(rows), self.spec.dim), value, np.float32), rows, self.clock, 2)
        with self.shard.batch() as batch:
            assert self.shard.push_gradients(batch, self.header(), rows, gradients)
        self.clock += 1

    def write(self, slots: Any, value: float, block: int = BLOCK) -> None:
        rows = self.rows(slots, block)
        precision = BlockCodec(self.spec).precision
        values = precision.rounded(np.full((len(rows), self.spec.dim), value, np.float32), rows, 0, 0)
        last_step = np.full(len(rows), self.clock)
        with self.shard.batch() as batch:
            assert self.shard.write_state(batch, self.header(), rows, values, values, last_step)


# ---- bytes


@pytest.mark.parametrize("spec", [*in_both(SMALL), *in_both(LARGE), replace(SMALL, dim=600)], ids=named)
def test_what_each_checksum_covers(spec: TableSpec) -> None:
    """As the docstring of blocks.py says."""
    block, (weight, momentum_buffer) = bytes(sealed(spec)), offsets(spec)
    size = spec.value_bytes * spec.dim
    assert rows_per_group(spec) == max(1, 2_048 // size)
    end = momentum_buffer + spec.rows_per_block * size
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
    stored, whole, generator = Stored(spec, {BLOCK: bytes(sealed(spec))}), sealed(spec), np.random.default_rng(0)
    codec, before = BlockCodec(spec), [stored.fetch(slots) for slots in groups(spec)]
    for position in positions:
        changed = whole.copy()
        changed[position] ^= int(generator.integers(1, 256))
        stored[BLOCK] = changed
        hurt = group_at(spec, position)
        assert codec.problem(BLOCK, WRITE_ID, changed), position
        for group, slots in enumerate(groups(spec)):
            said = stored.damaged(slots)
            if hurt is None:
                assert said.startswith(codec.name(BLOCK)), (position, group)
            elif hurt == group:
                first, last = stored.rows(slots)[[0, -1]]
                assert f"{codec.name(BLOCK)} is damaged (checksum) in rows {first}..{last}: " in said, position
            else:
                assert stored.fetch(slots) == before[group], position


@pytest.mark.guard
@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", in_both(replace(SMALL, num_rows=1_000, dim=40, rows_per_block=60)), ids=named)
def test_every_flipped_byte_concerns_its_rows_alone(spec: TableSpec) -> None:
    check_flips(spec, range(BlockCodec(spec).num_bytes))


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", [*in_both(SMALL), *in_both(LARGE)], ids=named)
def test_some_flipped_bytes_concern_their_rows_alone(spec: TableSpec) -> None:
    codec = BlockCodec(spec)
    weight, momentum_buffer = offsets(spec)
    edges = [0, 1, 2, 4, 8, 15, 16, weight - 1, weight, momentum_buffer - 1, momentum_buffer, codec.num_bytes - 1]
    check_flips(spec, [*edges, *np.random.default_rng(1).integers(0, codec.num_bytes, 40).tolist()])


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", in_both(SMALL), ids=named)
def test_exchanged_parts_are_noticed(spec: TableSpec) -> None:
    """Groups of one block, with or without their checksums; the same group of two blocks; whole blocks; formats."""
    codec = BlockCodec(spec)
    weight, momentum_buffer = offsets(spec)
    end = codec.num_bytes - 8 * len(groups(spec))
    one, other, size = sealed(spec), sealed(spec, BLOCK + 1), spec.value_bytes * spec.dim * 4
    last = (spec.rows_per_block // 4 - 1) * size  # the last four rows are a group
    stored = Stored(spec, {BLOCK: bytes(one), BLOCK + 1: bytes(other)})
    first_rows, last_rows = groups(spec)[0], groups(spec)[-1]

    def exchanged(*places: tuple[int, int, int]) -> bytearray:
        changed = one.copy()
        for at, to, length in places:
            changed[at : at + length], changed[to : to + length] = one[to : to + length], one[at : at + length]
        return changed

    values = [(at, at + last, size) for at in (weight, momentum_buffer)]
    stored[BLOCK] = exchanged(*values)
    assert "in rows" in stored.damaged(first_rows)
    assert "in rows" in stored.damaged(last_rows)
    stored[BLOCK] = exchanged((weight, momentum_buffer, momentum_buffer - weight))
    assert "in rows" in stored.damaged(last_rows), "weights and momentum buffers"
    stored[BLOCK] = exchanged(*values, (end, codec.num_bytes - 8, 8))
    assert stored.damaged(first_rows).startswith(f"{codec.name(BLOCK)} is damaged (checksum): ")
    stored[BLOCK] = one[:weight] + other[weight : weight + last] + one[weight + last :]
    assert "in rows" in stored.damaged(first_rows)
    assert not stored.damaged(last_rows)
    for start in (weight, end):  # with all checksums of groups
        stored[BLOCK] = one[:start] + other[start:]
        assert "is damaged (checksum): " in stored.damaged(last_rows)
    stored[BLOCK] = other
    assert "is damaged (checksum): " in stored.damaged(last_rows)
    stored[BLOCK] = one
    assert not stored.damaged(ALL)


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", in_both(SMALL), ids=named)
def test_a_block_of_another_write_is_refused(spec: TableSpec) -> None:
    """All of it, or any run of its 512-byte pieces: also the same rows, stored once more."""
    older, stored = bytes(sealed(spec)), Stored(spec, {BLOCK: bytes(sealed(spec))})
    stored.push(ALL)
    assert stored.write_id(BLOCK) != WRITE_ID
    newer = stored[BLOCK]
    again = bytearray(newer)
    BlockCodec(spec).seal(BLOCK, WRITE_ID, again)
    for wrong in (older, again):
        stored[BLOCK] = wrong
        assert "is damaged (checksum)" in stored.damaged(ALL)
        with pytest.raises(DamagedRecordError):
            stored.push([0])
    pieces = range(0, len(newer), 512)
    for first in pieces:
        for last in pieces[first // 512 :]:
            mixed = newer[:first] + older[first : last + 512] + newer[last + 512 :]
            stored[BLOCK] = mixed
            assert bool(stored.damaged(ALL)) == (mixed != newer), (first, last)


@pytest.mark.usefixtures("computing")
def test_a_block_of_another_length_is_refused() -> None:
    """With checksums and without."""
    stored, whole = Stored(SMALL, {BLOCK: bytes(sealed(SMALL))}), sealed(SMALL)
    for changed in (b"", whole[:7], whole[:-1], whole[:-8], whole + b"x", whole + whole):
        stored[BLOCK] = changed
        assert f"has {len(changed)} bytes, not {len(whole)}: " in stored.damaged([0])


def test_a_whole_check_names_all_damaged_rows() -> None:
    codec, block = BlockCodec(LARGE), sealed(LARGE)
    for slot in (9, 12, 62):
        codec.views(block).momentum_buffer[slot, 5] += 1
    assert codec.problem(BLOCK, WRITE_ID, block) == "is damaged (checksum) in rows 197..204, 249..251"
    assert codec.problem(BLOCK, WRITE_ID, block, slice(8, 9)) == "is damaged (checksum) in rows 197..200"
    assert codec.problem(BLOCK, WRITE_ID, block, np.array([0, 7, 62])) == "is damaged (checksum) in rows 249..251"
    assert codec.problem(BLOCK, WRITE_ID, block, slice(0, 8)) == ""


def test_a_message_names_few_ranges_and_only_rows_of_the_table() -> None:
    """gRPC sends messages of at most 8 KiB with certainty."""
    spec = TableSpec(num_rows=2_100, dim=512, rows_per_block=2_048)
    codec, end = BlockCodec(spec), "and 1016 more ranges"
    block = codec.initial(0)
    codec.seal(0, 1, block)
    codec.views(block).weight[::2] += 1
    named = ", ".join(str(row) for row in range(0, 16, 2))
    assert codec.problem(0, 1, block) == f"is damaged (checksum) in rows {named} {end}"
    last = codec.initial(1)
    codec.seal(1, 1, last)
    codec.views(last).weight[50:60] += 1
    assert codec.problem(1, 1, last) == "is damaged (checksum) in rows 2098..2099"
    assert codec.problem(1, 1, last, slice(52, 60)) == "is damaged (checksum) in rows that the table does not have yet"


# ---- writes


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", in_both(SMALL), ids=named)
def test_a_write_beside_damage_is_refused(spec: TableSpec) -> None:
    """Or what was read wrongly once, and is right on the disk, would be stored in its place."""
    codec, damaged = BlockCodec(spec), sealed(spec)
    hurt, intact = groups(spec)[-1], groups(spec)[0]
    codec.views(damaged).weight[hurt[1], 3] += 1
    stored = Stored(spec, {BLOCK: bytes(damaged)})
    first, last = stored.rows(hurt)[[0, -1]]
    for write in (stored.push, lambda slots: stored.write(slots, 0.5)):
        for refused in (intact[1:3], hurt[:1], ALL):
            with pytest.raises(DamagedRecordError, match=rf"in rows {first}\.\.{last}: "):
                write(refused)
    assert stored[BLOCK] == damaged
    assert not stored.damaged(intact)


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("spec", in_both(SMALL), ids=named)
def test_a_write_renews_the_checksums_that_a_new_seal_has(spec: TableSpec) -> None:
    codec, generator = BlockCodec(spec), np.random.default_rng(0)
    for value in (0.5, 1e20, 1e10, 1.0):
        stored = Stored(spec, {BLOCK: bytes(sealed(spec))})
        for size, write in ((value, stored.push), (0.5, stored.push), (value, stored.write), (0.5, stored.write)):
            for share in (0.1, 0.3, 1.0):
                slots = np.flatnonzero(generator.random(spec.rows_per_block) < share)
                write(slots if len(slots) else [0], value=size)
                again = bytearray(stored[BLOCK])
                codec.seal(BLOCK, stored.write_id(BLOCK), again)
                assert again == stored[BLOCK], (value, size, share)
