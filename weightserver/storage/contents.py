"""A sum over everything that a directory stores, by which writes are noticed that a disk confirmed and then lost.

LMDB's pages have no checksums. Where a page was never written lies an older one, which is as sound: part of an earlier
tree, with earlier records or without later ones. So each transaction stores, beside the roots of the trees, its number
and the sum of the hashes of all items of each database but `blocks`, modulo 2^128. It changes the sums by what it puts
and deletes; a check computes them from what is there. Blocks are named by `versions`, which is one of the others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

from weightserver.storage.interface import DATABASES

COUNTED = tuple(name for name in DATABASES if name != "blocks")
_NUMBER = struct.Struct("<Q")
_SUM_BYTES = 16
_BYTES = _NUMBER.size + _SUM_BYTES * len(COUNTED)


class Contents:
    """The sums as a transaction finds and changes them.

    Args:
        stored: as `packed` returned it; empty for an empty directory.
    """

    def __init__(self, stored: bytes = b"") -> None:
        self.transaction = _NUMBER.unpack_from(stored)[0] if stored else 0
        """The one that stored it."""
        starts = range(_NUMBER.size, len(stored), _SUM_BYTES)
        sums = [int.from_bytes(stored[start : start + _SUM_BYTES], "little") for start in starts]
        self._sums = dict(zip(COUNTED, sums or [0] * len(COUNTED), strict=True))

    @staticmethod
    def is_of(stored: bytes, transaction: int) -> bool:
        """Whether that transaction stored these bytes."""
        return len(stored) == _BYTES and _NUMBER.unpack_from(stored)[0] == transaction

    def packed(self, transaction: int) -> bytes:
        """The value that this transaction stores."""
        sums = [(self._sums[name] % 2**128).to_bytes(_SUM_BYTES, "little") for name in COUNTED]
        return b"".join([_NUMBER.pack(transaction), *sums])

    def add(self, database: str, key: bytes, value: bytes | bytearray | memoryview) -> None:
        self._sums[database] += _hash(database, key, value)

    def remove(self, database: str, key: bytes, value: bytes | memoryview) -> None:
        self._sums[database] -= _hash(database, key, value)

    def clear(self, database: str) -> None:
        self._sums[database] = 0

    def agrees(self, database: str, items: Iterable[tuple[bytes, memoryview]]) -> bool:
        """Whether the database holds these items."""
        found = sum(_hash(database, key, value) for key, value in items)
        return (found - self._sums[database]) % 2**128 == 0


def _hash(database: str, key: bytes, value: bytes | bytearray | memoryview) -> int:
    hasher = xxhash.xxh3_128(key, seed=COUNTED.index(database) << 32 | len(key))
    hasher.update(value)
    return hasher.intdigest()
