"""A shard larger than memory: its map grows beyond RAM and swap, and a restart finds everything."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import psutil
import pytest

from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.committer import commit_group
from weightserver.inspect import inspect_directory
from weightserver.shard import Batch, Shard
from weightserver.storage import LmdbStorage

PAGE_BYTES = 4096
LAST_PAGE = struct.Struct("<Q")
LAST_PAGE_OFFSET = 16 + 24 + 2 * 48
"""In LMDB's first two pages: after the page's header, four fields and the records of two databases."""
MEMORY_BYTES = psutil.virtual_memory().total + psutil.swap_memory().total


def lengthen(directory: Path, num_bytes: int) -> None:
    """Makes a stopped shard's file `num_bytes` long, as if so many had been written. They take no disk.

    To LMDB, pages that are neither used nor free are a leak, which it leaves alone.
    """
    with (directory / "data.mdb").open("r+b") as file:
        for meta in (0, 1):
            file.seek(meta * PAGE_BYTES + LAST_PAGE_OFFSET)
            assert 0 < LAST_PAGE.unpack(file.read(LAST_PAGE.size))[0] < num_bytes // PAGE_BYTES
            file.seek(meta * PAGE_BYTES + LAST_PAGE_OFFSET)
            file.write(LAST_PAGE.pack(num_bytes // PAGE_BYTES - 1))
        file.truncate(num_bytes)


def test_a_map_outgrows_memory(tmp_path: Path) -> None:
    """By what all of a server's writes go through, and again after a restart."""
    LmdbStorage(tmp_path, room_bytes=64 << 10).close()
    lengthen(tmp_path, MEMORY_BYTES)
    value = b"x" * 60_000
    for first in (0, 100):
        storage = LmdbStorage(tmp_path, room_bytes=64 << 10)
        shard = Shard(storage, shard=0, num_shards=1)

        def put(batch: Batch, first: int = first) -> None:
            for block in range(first, first + 100):
                batch.txn.put_block(block, 0, value)

        answer: Future[None] = Future()
        commit_group(shard.batch, [(put, answer)])
        answer.result()
        assert storage.disk_usage().map_size > 2 * MEMORY_BYTES
        with storage.read() as txn:
            assert list(txn.block_versions()) == [(block, 0) for block in range(first + 100)]
            assert all(bytes(txn.newest_block(block) or b"") == value for block in range(first + 100))
        storage.close()
    assert (tmp_path / "data.mdb").stat().st_blocks * 512 < 100 << 20


def test_a_map_takes_the_address_space_that_is_left(tmp_path: Path) -> None:
    """It grows by less than twice where `ulimit -v` allows no more; where that too is refused, reads still work."""
    storage = LmdbStorage(tmp_path)
    Shard(storage, shard=0, num_shards=1)
    storage.close()
    gigabyte = 1 << 30
    lengthen(tmp_path, 8 * gigabyte)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from weightserver import StorageError\n"
        "from weightserver.records import read_identity\n"
        "from weightserver.storage import LmdbStorage\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({13 * gigabyte},) * 2)\n"
        "storage = LmdbStorage(Path(sys.argv[1]))\n"
        "try:\n"
        "    while True:\n"
        "        print(storage.disk_usage().map_size)\n"
        "        storage._grow()\n"
        "except StorageError as error:\n"
        "    print(error)\n"
        "with storage.read() as txn:\n"
        "    print(read_identity(txn).num_shards)\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    *sizes, refused, num_shards = done.stdout.splitlines()
    assert 11 * gigabyte < int(sizes[-1]) < 13 * gigabyte, done.stdout
    assert refused.endswith("give the process more address space (ulimit -v)")
    assert num_shards == "1"


@pytest.mark.guard
def test_a_server_writes_beyond_memory(tmp_path: Path) -> None:
    """Written through a client until the map has grown, restarted, written and read again."""
    spec, directory = TableSpec(num_rows=1_000_000, dim=128), tmp_path / "shard-0"
    weight, momentum = np.random.default_rng(0).standard_normal((2, 16_380, spec.dim), dtype=np.float32)
    LocalCluster(1, tmp_path).close()
    lengthen(directory, MEMORY_BYTES)

    def write(client: WeightClient, starts: range) -> None:
        client.open_session("run")
        for start in starts:
            client.write_state(start + np.arange(len(weight)), weight, momentum, 0)

    starts = range(0, 20 * len(weight), len(weight))
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses, retry_seconds=10) as client:
        client.create_table(spec)
        client.extend_schedule(0, np.zeros(1))
        write(client, starts[:-1])  # 340 MB: half as much again as the map's room
        cluster.restart(0)
        write(client, starts[-1:])
        rows = np.random.default_rng(1).integers(0, starts.stop, 1000)
        np.testing.assert_array_equal(client.fetch(rows, step=0), weight[rows % len(weight)])
        assert client.describe().rows_stored == starts.stop
    assert (directory / "data.mdb").stat().st_size > MEMORY_BYTES + (256 << 20)
    assert inspect_directory(directory)["rows_stored"] == starts.stop
