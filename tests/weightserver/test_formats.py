"""Formats on disk and on the wire, byte by byte."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from dataclasses import fields, replace
from pathlib import Path

import lmdb
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import given
from hypothesis import strategies as st

from weightserver.common.version import FORMAT
from weightserver.core.arrays import all_finite
from weightserver.core.blocks import BlockCodec
from weightserver.core.checkpoints import ShardCheckpoint
from weightserver.core.errors import InvalidRequestError, StorageError
from weightserver.core.exactly_once import WriterState
from weightserver.core.initial import initial_rows
from weightserver.core.lineage import Lineage
from weightserver.core.precision import MOMENTUM_BUFFER, WEIGHT
from weightserver.core.sharding import Sharding, from_ranges, to_ranges
from weightserver.core.spec import TableSpec
from weightserver.core.versions import Version
from weightserver.protocol import codec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import (
    decode_fetch_response,
    encode_fetch_response,
    named_rows,
    rows_to_proto,
    spec_from_proto,
    spec_to_proto,
    table_number,
)
from weightserver.server.request_memory import blocks_bytes
from weightserver.storage import records
from weightserver.storage.interface import DATABASES
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.lmdb_transaction import CONTENTS
from weightserver.storage.records import State

GOLDEN = Path(__file__).parent.parent / "golden" / "block.json"
FORMATS = GOLDEN.with_name("formats.json")
SPEC = TableSpec(num_rows=50, dim=3, rows_per_block=10, seed=7)
HALVED = replace(SPEC, dtype="bfloat16")
OTHER = TableSpec(
    num_rows=7,
    dim=2,
    momentum=0.5,
    weight_decay=0.1,
    init_std=1,
    seed=3,
    rows_per_block=9,
    correction="paper",
    dtype="bfloat16",
)


WRITE_ID = 2**40 + 9


def sealed_block(spec: TableSpec = SPEC) -> bytearray:
    codec = BlockCodec(spec)
    block = codec.initial(2)
    views = codec.views(block)
    views.last_step[:] = np.arange(10) * 1_000_000_007
    momentum_buffer = (np.arange(30).reshape(10, 3) / 8).astype(np.float32)
    views.momentum_buffer[:] = codec.precision.rounded(momentum_buffer, np.arange(20, 30), 0, MOMENTUM_BUFFER)
    assert codec.mark_written(block, np.array([0, 3, 9])) == 3
    assert codec.mark_written(block, np.array([3, 4])) == 1
    codec.seal(2, WRITE_ID, block)
    return block


@pytest.mark.parametrize("spec", [SPEC, HALVED], ids=lambda spec: spec.dtype)
def test_block_layout(spec: TableSpec) -> None:
    """The layout that the docstring of blocks.py describes; see test_row_checksums.py for the checksums."""
    block, size = bytes(sealed_block(spec)), 30 * spec.value_bytes
    assert block.hex() == json.loads(GOLDEN.read_text())[spec.dtype]
    assert struct.unpack_from("<HHI", block) == (spec.value_bytes, 10, 3)
    assert block[16:24] == bytes([0b00011001, 0b10, 0, 0, 0, 0, 0, 0])
    assert struct.unpack_from("<10q", block, 24) == tuple(i * 1_000_000_007 for i in range(10))
    rows, precision = np.arange(20, 30), BlockCodec(spec).precision
    assert block[104 : 104 + size] == precision.rounded(initial_rows(SPEC, rows), rows, 0, WEIGHT).tobytes()
    eighths = np.arange(30, dtype=np.float32) / 8  # the same number in bfloat16
    halves = eighths.view("<u2").reshape(30, 2)[:, 2 - spec.value_bytes // 2 :]
    assert block[104 + size : -8] == halves.tobytes()
    assert len(block) == 104 + 2 * size + 8


def layouts(directory: Path) -> dict[str, str]:
    """Digests of the protocol, and of a directory's contents, which hold each kind of record with all of its fields."""
    messages = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb).SerializeToString(deterministic=True)
    metadata = sorted((name, key) for name, key in vars(codec).items() if name.endswith("_KEY"))
    kept = ShardCheckpoint("kept", 1, b"c" * 16, ("0123456789abcdef:1",), generation=0, rows_stored=4, num_rows=50)
    state = State(1, "ab", "run", 2, 4, 1, 0, "0123456789abcdef", 2, 1, "cd", (kept,))
    stored = list[object]()
    with contextlib.closing(LmdbStorage(directory)) as storage:
        with storage.write() as txn:
            records.write_identity(txn, records.ShardIdentity(0, 1))
            records.write_spec(txn, SPEC, b"i" * 16)
            records.write_state(txn, state)
            records.write_lineage(txn, Lineage().joined(["0123456789abcdef:1"]))
            records.write_peers(txn, ["0123456789abcdef:2"])
            records.append_schedule(txn, 0, np.array([0.1, 0.2], np.float32))
            records.put_record(txn, "writers", b"w" * 16, WriterState(7, applied=True).pack())
            txn.put_block(Version(2, 1, WRITE_ID), sealed_block())
        with storage.read() as txn:
            stored += [(name, key, bytes(value)) for name in DATABASES for key, value in txn.items(name)]
    with (
        lmdb.open(str(directory), max_dbs=len(DATABASES), readonly=True, lib_version=0) as opened,
        opened.begin() as raw,
    ):
        stored.append(raw.get(CONTENTS))
    parts = {"protocol": (messages, metadata), "stored": stored}
    return {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}


def test_a_changed_format_has_a_new_version(tmp_path: Path) -> None:
    found = layouts(tmp_path / "shard")
    assert json.loads(FORMATS.read_text()).get(FORMAT) == found, (
        f"the protocol or what is stored is not what version {FORMAT} means: others of that version would misread it. "
        f"Raise __version__ and FORMAT (common/version.py) if {FORMAT} was released; then note in {FORMATS.name}: "
        f"{json.dumps({FORMAT: found})}"
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(SPEC, dim=4, rows_per_block=8), r"rows 16\.\.23\) holds 10 rows of 3 values of 4 bytes: it belongs"),
        (replace(SPEC, dim=4), "has 352 bytes, not"),
    ],
)
def test_a_block_of_another_layout_is_not_reported_as_damaged(other: TableSpec, message: str) -> None:
    """Even if its blocks are as long."""
    with pytest.raises(StorageError, match=message):
        BlockCodec(other).check(2, WRITE_ID, sealed_block())


def test_the_default_block_fits_sixteen_pages() -> None:
    """Including the 16-byte header of the first overflow page."""
    assert BlockCodec(TableSpec(num_rows=1, dim=128)).num_bytes == 65_168
    assert 15 * 4096 < 65_168 + 16 <= 16 * 4096
    for rows, pages in ((62, 8), (125, 16)):  # what docs/operations.md recommends for bfloat16
        halved = TableSpec(num_rows=1, dim=128, rows_per_block=rows, dtype="bfloat16")
        assert (pages - 1) * 4096 < BlockCodec(halved).num_bytes + 16 <= pages * 4096
        assert BlockCodec(replace(halved, rows_per_block=rows + 1)).num_bytes + 16 > pages * 4096


@pytest.mark.parametrize(("dim", "rows"), [(128, 63), (1, 2_048), (3, 170), (600, 1), (65_536, 8)])
def test_a_write_reserves_memory_for_whole_blocks(dim: int, rows: int) -> None:
    """With the header of the first overflow page, and a page for the key."""
    for dtype in ("float32", "bfloat16"):
        spec = replace(SPEC, dim=dim, rows_per_block=rows, dtype=dtype)
        codec = BlockCodec(spec)
        assert blocks_bytes(codec, 1) == 4096 * (1 + -(-(codec.num_bytes + 16) // 4096))
    assert blocks_bytes(BlockCodec(TableSpec(num_rows=1, dim=128)), 3) == 3 * 17 * 4096


increasing = st.lists(st.integers(0, 300), unique=True).map(lambda rows: np.array(sorted(rows), np.int64))


@given(increasing)
def test_rows_as_ranges_and_back(rows: np.ndarray) -> None:
    assert np.array_equal(from_ranges(to_ranges(rows)), rows)
    message = rows_to_proto(rows)
    assert np.array_equal(named_rows(message).array(), rows)
    assert len(message.ids) + len(message.ranges) <= 8 * len(rows)


@given(increasing, st.integers(1, 9), st.integers(1, 5))
def test_each_row_lives_on_one_shard(rows: np.ndarray, rows_per_block: int, num_shards: int) -> None:
    parts = Sharding(rows_per_block, num_shards).positions_by_shard(rows)
    for shard, positions in parts.items():
        assert {row // rows_per_block % num_shards for row in rows[positions].tolist()} == {shard}
    assert sorted(row for positions in parts.values() for row in rows[positions].tolist()) == rows.tolist()


@pytest.mark.parametrize(
    "message",
    [
        pb.Rows(ids=b"1234567"),
        pb.Rows(ids=bytes(8), ranges=bytes(16)),
        pb.Rows(ranges=bytes(8)),
        pb.Rows(ranges=struct.pack("<2q", 0, 0)),
        pb.Rows(ranges=struct.pack("<2q", 0, -5)),
        pb.Rows(ranges=struct.pack("<2q", 0, 2**62)),
        pb.Rows(ranges=struct.pack("<4q", 0, 2**24, 2**30, 2**24)),
    ],
)
def test_rejects_invalid_rows(message: pb.Rows) -> None:
    with pytest.raises(InvalidRequestError):
        named_rows(message).array()


@given(st.integers(0, 300), st.booleans())
def test_hand_encoded_answers_match_the_contract(num_rows: int, state: bool) -> None:
    weight = np.random.default_rng(num_rows).standard_normal((num_rows, 3)).astype(np.float32)
    momentum, last_step = (weight * 2, np.arange(num_rows)) if state else (None, None)
    expected = pb.FetchResponse(weight=weight.tobytes())
    if momentum is not None and last_step is not None:
        expected.momentum_buffer, expected.last_step = momentum.tobytes(), last_step.tobytes()
    message = encode_fetch_response(weight, momentum, last_step)
    assert message == expected.SerializeToString(deterministic=True)
    fields = decode_fetch_response(message)
    assert [bytes(field) for field in fields] == [expected.weight, expected.momentum_buffer, expected.last_step]


def test_fields_of_a_newer_shard_are_skipped() -> None:
    weight = np.ones((40, 3), np.float32)
    message = encode_fetch_response(weight, None, np.arange(40))
    text, varint, double, single = b"\x52\x03abc", b"\x58\x96\x01", b"\x61" + b"8" * 8, b"\x6d" + b"4" * 4
    newer = text + varint + message + double + single
    assert pb.FetchResponse.FromString(newer).weight == weight.tobytes()
    assert decode_fetch_response(newer) == decode_fetch_response(message)


def test_an_answer_cut_off_is_noticed_at_every_byte() -> None:
    """Every prefix is refused, except those that end between two fields."""
    weight = np.ones((40, 3), np.float32)
    message = encode_fetch_response(weight, weight, np.arange(40))
    fields = [length + 2 + (length > 127) for length in (480, 480, 320)]
    assert sum(fields) == len(message)
    for length in range(len(message)):
        if length in (0, fields[0], fields[0] + fields[1]):
            decode_fetch_response(message[:length])
            continue
        with pytest.raises(InvalidRequestError, match="is this a weight server"):
            decode_fetch_response(message[:length])


@given(st.binary(max_size=200))
def test_garbage_in_an_answer_is_one_kind_of_error(message: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):  # any other fails the test
        fields = decode_fetch_response(message)
        assert sum(map(len, fields)) < len(message) or not message


def test_specs_survive_the_wire() -> None:
    for correction in (True, False, "paper", "exact", "none"):
        spec = TableSpec(
            num_rows=10**12, dim=7, momentum=0.123, weight_decay=0.0, seed=2**64 - 1, correction=correction
        )
        for kept in (spec, replace(spec, dtype="bfloat16")):
            assert spec_from_proto(pb.TableSpec.FromString(spec_to_proto(kept).SerializeToString())) == kept


def test_every_value_of_a_table_but_its_size_changes_its_number() -> None:
    spec = TableSpec(num_rows=500, dim=8, rows_per_block=6)
    others = [replace(spec, **{field.name: getattr(OTHER, field.name)}) for field in fields(TableSpec)]
    numbers = {table_number(one, b"i" * 16) for one in (spec, *others)} | {table_number(spec, b"j" * 16)}
    assert len(numbers) == len(others) + 1
    assert table_number(replace(spec, num_rows=501), b"i" * 16) == table_number(spec, b"i" * 16)


def test_all_finite() -> None:
    huge = np.full(100, 3e38, np.float32)  # their sum overflows
    assert all_finite(huge)
    for bad in (np.nan, np.inf, -np.inf):
        huge[50] = bad
        assert not all_finite(huge)
    assert not all_finite(np.array([np.inf, -np.inf], np.float32))
    assert all_finite(np.zeros(0, np.float32))
