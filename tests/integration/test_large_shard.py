"""A shard larger than memory: its map grows beyond RAM and swap, and a restart finds everything."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest

from tests.helpers.stored import get, put, stored
from tests.integration.tables import begin
from weightserver import LocalCluster, StorageError, TableSpec, WeightClient
from weightserver.operations.inspect import inspect_directory
from weightserver.shard.group_commit import CancellableFuture, commit_group
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteTransaction
from weightserver.storage import integrity, lmdb_storage
from weightserver.storage.lmdb_storage import LmdbStorage

PAGE_BYTES = 4096
LAST_PAGE = struct.Struct("<Q")
LAST_PAGE_OFFSET = 16 + 24 + 2 * 48
"""In LMDB's first two pages: after the page's header, four fields and the records of two databases."""
MEMORY_BYTES = psutil.virtual_memory().total + psutil.swap_memory().total


UNCHECKED = "from weightserver.storage import lmdb_storage; lmdb_storage.check_pages = lambda data: None\n"
OPENS = f"""{UNCHECKED}
import resource, sys
from pathlib import Path
from weightserver import StorageError
from weightserver.storage.records import read_identity
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
try:
    storage = lmdb_storage.LmdbStorage(Path(sys.argv[1]))
except StorageError as error:
    sys.exit(str(error))
with storage.read() as txn:
    print(storage.disk_usage().map_size, read_identity(txn).num_shards)
"""


class UncheckedCluster(LocalCluster):
    """A LocalCluster whose shards do not look for pages that are neither used nor free."""

    _program: ClassVar[list[str]] = [sys.executable, "-c", UNCHECKED + "from weightserver.cli import main; main()"]


def lengthen(directory: Path, num_bytes: int) -> None:
    """Makes a stopped shard's file `num_bytes` long, as if that much had been written. It takes no disk space.

    LMDB leaves pages alone that are neither used nor free; a shard would refuse them, so `UNCHECKED` is for them.
    """
    with (directory / "data.mdb").open("r+b") as file:
        for meta in (0, 1):
            file.seek(meta * PAGE_BYTES + LAST_PAGE_OFFSET)
            assert 0 < LAST_PAGE.unpack(file.read(LAST_PAGE.size))[0] < num_bytes // PAGE_BYTES
            file.seek(meta * PAGE_BYTES + LAST_PAGE_OFFSET)
            file.write(LAST_PAGE.pack(num_bytes // PAGE_BYTES - 1))
        file.truncate(num_bytes)


def test_a_map_takes_the_address_space_that_is_left(tmp_path: Path) -> None:
    """Half of it, if `ulimit -v` sets a limit; a file that does not fit is refused in one line."""
    with closing(LmdbStorage(tmp_path)) as storage:
        Shard(storage, shard=0, num_shards=1)
    gigabyte = 1 << 30
    lengthen(tmp_path, 8 * gigabyte)

    def opened(limit: int) -> tuple[list[int], str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", OPENS, str(tmp_path), str(limit * gigabyte)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return list(map(int, done.stdout.split())), done.stderr

    (map_bytes, num_shards), error = opened(13)
    assert (9 * gigabyte < map_bytes < 12 * gigabyte, num_shards, error) == (True, 1, "")
    found, error = opened(8)
    assert (found, error.count("\n")) == ([], 1)
    assert error.endswith("give the process more address space (ulimit -v)\n")


def test_a_full_map_refuses_writes_and_answers_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart finds room again."""
    monkeypatch.setattr(lmdb_storage, "_ROOM_BYTES", 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(lmdb_storage, "_MAP_BYTES", 0)
        storage = LmdbStorage(tmp_path)
    shard, value = Shard(storage, shard=0, num_shards=1), b"x" * 60_000

    def write(first: int, count: int) -> CancellableFuture[None]:
        def operation(batch: WriteTransaction) -> None:
            for block in range(first, first + count):
                put(batch.txn, block, 0, value)

        answers = [CancellableFuture(operation), CancellableFuture(lambda batch: put(batch.txn, 99, 0, value))]
        commit_group(shard.batch, answers)
        answers[1].result()
        return answers[0]

    write(0, 2).result()
    with pytest.raises(StorageError, match=r"give the process more address space \(ulimit -v\)"):
        write(2, 90).result()
    with storage.read() as txn:
        assert [number for number, _ in stored(txn)] == [0, 1, 99]
        assert get(txn, 1) == value
    storage.close()
    storage = LmdbStorage(tmp_path)
    shard = Shard(storage, shard=0, num_shards=1)
    write(2, 90).result()
    storage.close()


@pytest.mark.guard
def test_a_server_writes_beyond_memory(tmp_path: Path) -> None:
    """Writes through a client until the map has grown, restarts, writes and reads again."""
    spec, directory = TableSpec(num_rows=1_000_000, dim=128), tmp_path / "shard-0"
    weight, momentum = np.random.default_rng(0).standard_normal((2, 16_380, spec.dim), dtype=np.float32)
    LocalCluster(1, tmp_path).close()
    lengthen(directory, MEMORY_BYTES)

    def write(client: WeightClient, starts: range) -> None:
        client.open_session("run")
        for start in starts:
            client.write_state(start + np.arange(len(weight)), weight, momentum, 0)

    starts = range(0, 20 * len(weight), len(weight))
    with UncheckedCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses, retry_seconds=10) as client:
        client.create_table(spec)
        write(client, starts[:-1])  # 340 MB: half as much again as the map's room
        cluster.restart(0)
        write(client, starts[-1:])
        rows = np.random.default_rng(1).integers(0, starts.stop, 1000)
        np.testing.assert_array_equal(client.fetch(rows, step=0), weight[rows % len(weight)])
        assert client.describe().rows_stored == starts.stop
    assert (directory / "data.mdb").stat().st_size > MEMORY_BYTES + (256 << 20)
    assert inspect_directory(directory)["rows_stored"] == starts.stop


def resident_bytes(path: Path) -> int:
    """The number of bytes of a file in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // PAGE_BYTES), np.uint8)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        found = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), pages.ctypes.data_as(ctypes.c_void_p)
        )
        assert found == 0, os.strerror(ctypes.get_errno())
    return int((pages & 1).sum()) * PAGE_BYTES


def let_go(path: Path) -> None:
    """Drops a file that no process maps from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.guard
def test_rows_anywhere_read_no_more_than_their_blocks(tmp_path: Path) -> None:
    """Fetches and pushes with a cold page cache, whatever the disk's readahead."""
    spec, data = TableSpec(num_rows=63 * 300, dim=128), tmp_path / "shard-0" / "data.mdb"
    weight, momentum = np.random.default_rng(0).standard_normal((2, spec.num_rows, spec.dim), dtype=np.float32)
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        begin(client, spec)
        client.write_state(np.arange(spec.num_rows), weight, momentum, 0)
    let_go(data)
    if resident_bytes(data) > data.stat().st_size / 10:
        pytest.skip("the file system of the temporary directory keeps files in memory")
    block_bytes = 16 * PAGE_BYTES
    with closing(LmdbStorage(data.parent, readonly=True, scattered=True)) as storage, storage.read() as txn:
        before = resident_bytes(data)
        assert None not in txn.newest_blocks(np.arange(0, 300, 10)).contents
        assert 27 * block_bytes <= resident_bytes(data) - before < 35 * block_bytes
    let_go(data)
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        client.open_session("run")
        client.extend_schedule(0, np.zeros(1))
        blocks = np.random.default_rng(1).choice(spec.num_blocks, 40, replace=False)
        rows = np.sort(blocks * spec.rows_per_block + 5)
        before = resident_bytes(data)
        np.testing.assert_array_equal(client.fetch(rows[::2], step=0), weight[rows[::2]])
        fetched = resident_bytes(data)
        client.push_gradients(rows[1::2], np.ones((20, spec.dim), np.float32), step=0)
        pushed = resident_bytes(data)
    assert 10 * block_bytes < fetched - before < 25 * block_bytes
    # The push writes as many again, and the tree's pages above them.
    assert 20 * block_bytes < pushed - fetched < 50 * block_bytes


@pytest.mark.guard
def test_a_large_file_is_read_ahead_of_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that uses the first page of each value, and ends with the check, or whoever waits for it."""
    data, ended = tmp_path / "data.mdb", list[int]()
    with closing(LmdbStorage(tmp_path)) as storage, storage.write() as txn:
        for block in range(300):
            put(txn, block, 0, bytes(60_000))
    command = [sys.executable, "-m", "weightserver.storage.integrity", str(data), "keys"]
    let_go(data)
    with subprocess.Popen(command, stdin=subprocess.PIPE) as reader:
        assert reader.wait() == 0
    if resident_bytes(data) > data.stat().st_size / 10:
        pytest.skip("the file system of the temporary directory keeps files in memory")
    assert resident_bytes(data) > 300 * PAGE_BYTES

    class Noted(subprocess.Popen[str]):
        def __exit__(self, *arguments: Any) -> None:
            super().__exit__(*arguments)
            ended.append(self.returncode)

    monkeypatch.setattr(integrity, "_LARGE_BYTES", 0)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    integrity.check_pages(data)
    data.write_bytes(data.read_bytes()[: 100 * PAGE_BYTES])
    with pytest.raises(StorageError, match="is damaged"):
        integrity.check_pages(data)
    assert set(ended) <= {0, -signal.SIGKILL, -signal.SIGBUS, 1}
    assert len(ended) == 2
