"""Reads a data file's records, besides its blocks, as bytes: without a lock and without LMDB's reader slots.

While a stopped process holds a reader slot, the file grows with every write, because the pages of its snapshot cannot
be reused. Here the writer does not wait for the reader; the reader checks afterwards whether its pages may have been
overwritten.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import lmdb.verify

from weightserver.core.errors import StorageError

Result = TypeVar("Result")
_PATIENCE_SECONDS = 10.0
_HEAD_BYTES = 1 << 16
"""More than the two pages at the file's beginning, one of which locates the last transaction's pages."""
_PAGE_HEADER = struct.Struct("=QHHHH")
"""The page's number, unused, flags, the end of the array of node offsets, the beginning of the nodes."""
_NODE = struct.Struct("=HHHH")
"""The value's size in two parts, flags, the key's size; of a branch three parts of a page's number, the key's size."""
_LARGE_VALUE = 0x01
_BRANCH, _LEAF, _LARGE = 0x01, 0x02, 0x04
_META_BYTES = 136
_MAX_DEPTH = 32

DamagedError = lmdb.verify.VerifyError


class _Node(NamedTuple):
    """A node of a tree's page."""

    key: bytes
    number: int
    """In a branch the page below, in a leaf the value's size in bytes."""
    flags: int
    rest: memoryview
    """The bytes after the key."""


class Snapshot:
    """The last committed transaction, whose pages may change while they are read: reads may raise DamagedError."""

    def __init__(self, directory: Path, descriptor: int, head: bytes) -> None:
        self.directory = directory
        self._descriptor = descriptor
        metas = _metas(head)
        self._page_bytes, self._num_pages = metas.psize, metas.next_pgno
        self._databases = {
            key: lmdb.verify._Db(value, 0)  # type: ignore[no-untyped-call]
            for key, value in self._items(metas.meta.main.root)
            if len(value) == lmdb.verify.SIZEOF_MDB_DB
        }

    def num_entries(self, database: str) -> int:
        return int(self._database(database).entries)

    def get(self, database: str, key: bytes) -> memoryview | None:
        page = self._database(database).root
        for _ in range(_MAX_DEPTH):
            if page == lmdb.verify.P_INVALID:  # the database has no entries
                return None
            is_branch, nodes = self._page(page)
            if not is_branch:
                return next((self._value(node) for node in nodes if node.key == key), None)
            page = [nodes[0], *(node for node in nodes[1:] if node.key <= key)][-1].number
        raise DamagedError(f"its tree {database} is too deep")

    def items(self, database: str) -> Iterator[tuple[bytes, memoryview]]:
        yield from self._items(self._database(database).root)

    def _database(self, name: str) -> lmdb.verify._Db:
        if name.encode() not in self._databases:
            raise DamagedError(f"it has no {name}")
        return self._databases[name.encode()]

    def _items(self, root: int, depth: int = 0) -> Iterator[tuple[bytes, memoryview]]:
        if root == lmdb.verify.P_INVALID:
            return
        if depth == _MAX_DEPTH:
            raise DamagedError("a tree is too deep")
        is_branch, nodes = self._page(root)
        for node in nodes:
            if is_branch:
                yield from self._items(node.number, depth + 1)
            else:
                yield node.key, self._value(node)

    def _page(self, number: int) -> tuple[bool, list[_Node]]:
        """Whether a tree's page is a branch, and its nodes."""
        page = self._read(number, self._page_bytes)
        _, _, flags, lower, upper = _PAGE_HEADER.unpack_from(page)
        if flags not in (_BRANCH, _LEAF) or not _PAGE_HEADER.size <= lower <= upper <= self._page_bytes:
            raise DamagedError(f"page {number} is not a page of a tree")
        nodes = []
        for offset in struct.unpack_from(f"={(lower - _PAGE_HEADER.size) // 2}H", page, _PAGE_HEADER.size):
            if not upper <= offset <= self._page_bytes - _NODE.size:
                raise DamagedError(f"page {number} has a node outside of it")
            low, high, more, key_bytes = _NODE.unpack_from(page, offset)
            key_end = offset + _NODE.size + key_bytes
            first = low | high << 16
            number_or_size = first | more << 32 if flags == _BRANCH else first
            nodes.append(_Node(bytes(page[offset + _NODE.size : key_end]), number_or_size, more, page[key_end:]))
        if flags == _BRANCH and not nodes:
            raise DamagedError(f"page {number} is empty")
        return flags == _BRANCH, nodes

    def _value(self, node: _Node) -> memoryview:
        if node.flags & _LARGE_VALUE:
            page = self._read(int.from_bytes(node.rest[:8], sys.byteorder), _PAGE_HEADER.size + node.number)
            if _PAGE_HEADER.unpack_from(page)[2] != _LARGE:
                raise DamagedError("a large value is not where it should be")
            return page[_PAGE_HEADER.size :]
        if node.number > len(node.rest):
            raise DamagedError("a value does not end on its page")
        return node.rest[: node.number]

    def _read(self, number: int, num_bytes: int) -> memoryview:
        """Bytes from the beginning of a page."""
        if 0 < number < self._num_pages and num_bytes <= (self._num_pages - number) * self._page_bytes:
            found = os.pread(self._descriptor, num_bytes, number * self._page_bytes)
            if len(found) == num_bytes and _PAGE_HEADER.unpack_from(found)[0] == number:
                return memoryview(found)
        raise DamagedError(f"page {number} is not where it should be")


def read_snapshot(directory: Path, read: Callable[[Snapshot], Result]) -> Result:
    """The result of `read` on the last committed transaction; reads again if that was overwritten meanwhile.

    Raises:
        StorageError: the directory holds no data, damaged data, or is written to faster than it can be read.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    try:
        descriptor = os.open(directory / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(f"{directory} holds no weight server data: give the --data-dir of a shard") from None
    try:
        while True:
            head, failure = os.pread(descriptor, _HEAD_BYTES, 0), None
            try:
                result = read(Snapshot(directory, descriptor, head))
            except DamagedError as error:
                failure = StorageError(f"{directory}: data.mdb is damaged ({error}): restore it from a backup")
            except StorageError as error:
                failure = error
            if _is_intact(head, os.pread(descriptor, _HEAD_BYTES, 0)):
                if failure is not None:
                    raise failure
                return result
            if time.monotonic() >= until:
                raise StorageError(f"{directory} is written to faster than it can be read: try again")
    finally:
        os.close(descriptor)


def _is_intact(head: bytes, later: bytes) -> bool:
    """Whether no page of the transaction that was the last one at `head` can have been overwritten by `later`.

    Pages of a transaction that the next one frees are reused by the one after that at the earliest.
    """
    try:
        then, now = _metas(head), _metas(later)
    except DamagedError:
        return head == later
    slot = (then.meta.txnid & 1) * then.psize
    meta = slice(slot, slot + _PAGE_HEADER.size + _META_BYTES)
    return now.meta.txnid <= then.meta.txnid + 1 and head[meta] == later[meta]


def _metas(head: bytes) -> lmdb.verify._Verifier:
    """LMDB's verifier, which has read the file's first two pages."""
    metas = lmdb.verify._Verifier(io.BytesIO(head), sys.maxsize)  # type: ignore[no-untyped-call]
    metas.detect_engine()  # type: ignore[no-untyped-call]
    metas.load_metas()  # type: ignore[no-untyped-call]
    if metas.errors:
        raise DamagedError(metas.errors[0])
    return metas
