"""Blocks as versions before checksums of groups wrote them: formats 1 and 2, and 3 and 4 in bfloat16."""

from __future__ import annotations

import struct
from collections.abc import Callable

import xxhash

from weightserver.core.blocks import BlockCodec, Buffer, rows_per_group
from weightserver.core.spec import TableSpec
from weightserver.storage.interface import Transaction

_EARLIER = {5: 2, 7: 4}


def in_earlier_form(spec: TableSpec, block: int, stored: Buffer, *, of_0_1: bool = False) -> bytes:
    """The same rows in the earlier form; version 0.1 did not say whether values are small."""
    block_format = _EARLIER[stored[0]] - of_0_1
    is_small = not of_0_1
    num_groups = -(-spec.rows_per_block // rows_per_group(spec))
    content = bytes(stored[16 : len(stored) - 8 * num_groups])
    checksum = xxhash.xxh3_64_intdigest(content, seed=block + (1 << 63 if is_small else 0))
    return struct.pack("<HHIQ", block_format, spec.rows_per_block, spec.dim, checksum) + content


def make_earlier(txn: Transaction, spec: TableSpec, chosen: Callable[[int], bool], *, of_0_1: bool = False) -> int:
    """Brings all intact versions of the chosen blocks to the earlier form; returns how many were not in it."""
    codec, num_changed = BlockCodec(spec), 0
    for block, generation in [version for version in txn.block_versions() if chosen(version[0])]:
        stored = txn.newest_block(block, up_to=generation)
        assert stored is not None
        if stored[0] in _EARLIER and not codec.problem(block, stored):
            txn.put_block(block, generation, in_earlier_form(spec, block, stored, of_0_1=of_0_1))
            num_changed += 1
    return num_changed
