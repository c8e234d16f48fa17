"""Reads and changes the blocks of a storage, below the shard, and reads what the shard answers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weightserver import RowState
from weightserver.core.precision import precision_of
from weightserver.core.spec import TableSpec
from weightserver.core.versions import NEWEST, Version, new_write_id, newest
from weightserver.protocol.codec import decode_fetch_response
from weightserver.storage.interface import Transaction


def put(txn: Transaction, block: int, generation: int, value: bytes | bytearray | memoryview) -> None:
    """Stores a version, as a write of its own would."""
    txn.put_block(Version(block, generation, new_write_id()), value)


def get(txn: Transaction, block: int, up_to: int = NEWEST) -> bytes | None:
    """The content of the block's newest version."""
    (content,) = txn.newest_blocks(np.array([block]), up_to=up_to).contents
    return None if content is None else bytes(content)


def version_of(txn: Transaction, block: int, up_to: int = NEWEST) -> Version:
    """The block's newest version."""
    return next(version for version in newest(txn.versions(block), up_to) if version.block == block)


def stored(txn: Transaction) -> list[tuple[int, int]]:
    """(block, generation) of all versions."""
    return [(version.block, version.generation) for version in txn.versions()]


def decoded(chunks: Iterable[tuple[int, bytes]], spec: TableSpec) -> RowState:
    """The rows that `Shard.fetch` answered, in the table's dtype; what was not asked for is empty."""
    kinds = (precision_of(spec).dtype, precision_of(spec).dtype, np.dtype(np.int64))
    fields = zip(*(decode_fetch_response(message) for _, message in chunks), strict=True)
    weight, momentum_buffer, last_step = (
        np.frombuffer(b"".join(parts), kind) for parts, kind in zip(fields, kinds, strict=True)
    )
    return RowState(weight.reshape(-1, spec.dim), momentum_buffer.reshape(-1, spec.dim), last_step)
