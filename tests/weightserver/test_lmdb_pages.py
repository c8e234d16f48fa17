"""Blocks found in LMDB's own pages, many at once, are those that LMDB finds one by one."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.helpers.kernels_built import build, computing_with, load
from weightserver.core import kernel
from weightserver.storage import lmdb_storage
from weightserver.storage.lmdb_storage import LmdbStorage, _address

SIZES = [0, 1, 100, 1_500, 2_100, 5_000, 20_000]
"""Of values in a page of keys, at and beyond the largest one there, and of several pages."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> kernel.Kernel:
    return load(build(tmp_path_factory.mktemp("kernel")))


@pytest.fixture(autouse=True)
def computing(compiled: kernel.Kernel) -> Iterator[None]:
    with computing_with(compiled):
        yield


def finds_without_lmdb(storage: LmdbStorage, blocks: list[int], up_to: int) -> bool:
    """Whether the kernel finds these blocks. In either case they are those that LMDB finds."""
    wanted = np.array(blocks, np.int64)
    with storage.read() as txn:
        expected = [txn.newest_block(block, up_to=up_to) for block in blocks]
        assert txn.newest_blocks(wanted, up_to=up_to) == expected
        return txn._places(wanted, up_to) is not None


@pytest.mark.parametrize("seed", range(6))
def test_they_are_those_that_lmdb_finds(seed: int, tmp_path: Path) -> None:
    """Versions before and after a checkpoint, deleted ones, gaps, ends of pages; the map grows and moves meanwhile."""
    generator = np.random.default_rng(seed)
    first, span, maps = int(generator.choice([0, 2**40])), int(generator.choice([50, 1_000, 3_000])), set()
    storage = LmdbStorage(tmp_path, room_bytes=100_000 + 12_000 * span)
    for generation in (0, 1, 5, 70_000):
        with storage.write() as txn:
            for block in generator.permutation(span)[: span // 2].tolist():
                size = int(generator.choice(SIZES if seed % 2 else SIZES[-2:]))
                txn.put_block(first + block, generation, generator.bytes(size))
            for block in generator.permutation(span)[: span // 9].tolist():
                txn.delete_block(first + block, generation)
        for count in (1, 2, span // 10, span + 20):
            blocks = np.sort(generator.permutation(span + 20)[:count]) + first
            for up_to in (0, 1, 4, 2**32 - 1):
                assert finds_without_lmdb(storage, blocks.tolist(), up_to)
        with storage.read() as txn:
            assert txn._file is not None
            maps.add(len(txn._file.content))
    assert seed % 2 or len(maps) > 1
    storage.close()


def test_an_empty_database_has_none(tmp_path: Path) -> None:
    storage = LmdbStorage(tmp_path)
    assert finds_without_lmdb(storage, [0, 7], 0)
    assert finds_without_lmdb(storage, [], 0)
    storage.close()


def test_a_write_asks_lmdb_whose_pages_are_not_in_the_file_yet(tmp_path: Path) -> None:
    storage = LmdbStorage(tmp_path)
    with storage.write() as txn:
        txn.put_block(3, 0, b"new")
        assert [bytes(block or b"") for block in txn.newest_blocks(np.array([3, 4]))] == [b"new", b""]
    storage.close()


def test_a_file_of_a_machine_with_larger_pages_is_left_to_lmdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", mmap.PAGESIZE // 2)
    storage = LmdbStorage(tmp_path)
    with storage.write() as txn:
        txn.put_block(3, 0, b"block")
    assert not finds_without_lmdb(storage, [2, 3], 0)
    storage.close()


def test_an_unsound_page_is_left_to_lmdb(tmp_path: Path, compiled: kernel.Kernel) -> None:
    """Every page of keys and nodes, changed byte by byte: what is found lies in the file, or nothing is."""
    storage = LmdbStorage(tmp_path)
    nearly_a_page = storage._env.stat()["psize"] - 6
    with storage.write() as txn:
        for block in range(40):
            txn.put_block(block, 0, bytes([1 + block]) * (nearly_a_page if block % 2 else 50))
    with storage.read() as txn:
        assert txn._blocks.first()
        key, file = txn._blocks.key(), txn._file
        assert file is not None
        copy = bytearray(file.content[: file.num_pages * file.page_bytes])
        at = _address(key) - _address(file.content)
    storage.close()
    page = at // file.page_bytes * file.page_bytes
    blocks, unsound = np.arange(40), 0
    for position in range(page, page + file.page_bytes):
        before = copy[position]
        for value in (0, 255, before ^ 1, file.num_pages - 1):
            copy[position] = value
            places = np.zeros((40, 2), np.int64)
            found = memoryview(copy)[at : at + 12]
            end = compiled.find_blocks(memoryview(copy), file.page_bytes, file.num_pages, found, blocks, 0, 0, places)
            assert (places[:end].sum(axis=1) <= len(copy)).all()
            unsound += end < 40
        copy[position] = before
    assert unsound > 500

    def num_found(at: int, value: int) -> int:
        changed = copy.copy()
        changed[at] = value
        places, found = np.zeros((40, 2), np.int64), memoryview(changed)[page + 16 : page + 28]
        return compiled.find_blocks(memoryview(changed), file.page_bytes, file.num_pages, found, blocks, 0, 0, places)

    node = at - 8
    assert num_found(page, copy[page]) == 40
    assert num_found(page + 10, 0x01) == 0, "a page that is no leaf"
    assert num_found(node + 4, 0x04) == 0, "a node that is no value"
    assert num_found(node + 6, 16) == 0, "another key"


def test_what_the_kernel_does_not_tell_lmdb_does(
    tmp_path: Path, compiled: kernel.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only that the block is missing."""
    storage = LmdbStorage(tmp_path)
    with storage.write() as txn:
        for block in range(400):
            txn.put_block(block, 0, bytes([block % 256]) * 3_000)
    calls = []

    class OneSoundPage:
        def find_blocks(self, *arguments: Any) -> int:
            calls.append(arguments)
            return compiled.find_blocks(*arguments) if len(calls) == 1 else arguments[6]

    monkeypatch.setattr(kernel, "compiled", OneSoundPage)
    assert not finds_without_lmdb(storage, list(range(0, 410, 3)), 0)
    assert len(calls) > 1
    storage.close()


@pytest.mark.parametrize("bit", [0, 3, 13, 20, 40, 63])
def test_a_map_is_found_by_a_page_that_is_right(tmp_path: Path, bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LmdbStorage(tmp_path, room_bytes=100_000)
    with storage.write() as txn:
        txn.put_block(3, 0, b"block" * 1_000)
    page_bytes = storage._env.stat()["psize"]
    with storage._env.begin(buffers=True) as snapshot, snapshot.cursor() as cursor:
        cursor.first()
        page = _address(cursor.key()) // page_bytes
    whole = ctypes.string_at

    def damaged(address: int, size: int) -> bytes:
        read = bytearray(whole(address, size))
        if address // page_bytes == page:
            read[bit // 8] ^= 1 << bit % 8
        return bytes(read)

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "string_at", damaged)
        assert lmdb_storage._map_of(storage._env, storage._data) is None
    assert lmdb_storage._map_of(storage._env, storage._data) is not None
    storage.close()


def test_a_map_that_is_not_found_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no slot left for another reader, a file still grows."""

    def fails(buffer: object) -> int:
        raise lmdb.ReadersFullError("no slot")

    storage = LmdbStorage(tmp_path, room_bytes=100_000)
    with monkeypatch.context() as patch:
        patch.setattr(lmdb_storage, "_address", fails)
        storage._grow()
    with storage.write() as txn:
        txn.put_block(3, 0, b"block")
    assert not finds_without_lmdb(storage, [3, 4], 0)
    storage._grow()
    assert finds_without_lmdb(storage, [3, 4], 0)
    storage.close()
