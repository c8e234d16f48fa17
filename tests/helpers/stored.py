"""Reads and changes the blocks of a storage, below the shard."""

from __future__ import annotations

import numpy as np

from weightserver.core.versions import NEWEST, Version, new_write_id, newest
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
