"""Large transactions are written back while they are committed, and whatever happens to them, the thread ends."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.helpers.stored import get, put
from weightserver.storage import lmdb_storage, page_cache
from weightserver.storage.lmdb_storage import LmdbStorage


def test_the_system_writes_changed_pages_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    descriptor = os.open(path, os.O_RDONLY)
    assert page_cache.begin_writing_back(descriptor)
    os.close(descriptor)
    assert not page_cache.begin_writing_back(descriptor)


@pytest.mark.parametrize("works", [True, False])
def test_large_transactions_are_written_back_early(
    tmp_path: Path, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_storage, "_WRITE_BACK_BYTES", 50_000)
    called = threading.Event()
    monkeypatch.setattr(page_cache, "begin_writing_back", lambda descriptor: called.set() or works)
    storage = LmdbStorage(tmp_path)
    for num_blocks in (1, 2):
        with storage.write() as txn:
            for number in range(num_blocks):
                put(txn, number, 0, bytes([num_blocks]) * 30_000)
        assert called.is_set() == (num_blocks == 2)
        with storage.read() as txn:
            assert get(txn, num_blocks - 1) == bytes([num_blocks]) * 30_000
    assert "writeback" not in [thread.name for thread in threading.enumerate()]
    storage.close()


def test_a_transaction_is_committed_without_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(lmdb_storage, "_WRITE_BACK_BYTES", 1)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    storage = LmdbStorage(tmp_path)
    with storage.write() as txn:
        put(txn, 0, 0, b"block")
    with storage.read() as txn:
        assert get(txn, 0) == b"block"
    storage.close()
