"""Readers of other processes, for which a shard's file grows: who they are, and how much waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.helpers.commands import weightserver
from tests.helpers.stored import put
from tests.helpers.watching import metric, wait_until
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.operations.inspect import inspect_directory
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard
from weightserver.shard.sweeper import Sweeper
from weightserver.storage.directory import OwnerLock, last_transaction, noted_reader
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.readers import OldReader, _snapshots

READER = """
import lmdb, sys
with lmdb.open(sys.argv[1], readonly=True, max_dbs=8) as environment, environment.begin():
    print("open", flush=True)
    sys.stdin.read()
"""
ROWS, ONES = np.arange(5_000), np.ones((5_000, 32), np.float32)


def reading(directory: Path) -> subprocess.Popen[str]:
    """A process that keeps a snapshot until its stdin is closed, as a notebook may."""
    command = [sys.executable, "-c", READER, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_what_waits_for_a_reader_is_what_was_freed_since(tmp_path: Path) -> None:
    kept = LmdbStorage(tmp_path)
    Shard(kept, shard=0, num_shards=1)

    def rewrite(times: int) -> None:
        for _ in range(times):
            with kept.write() as txn:
                for block in range(20):
                    put(txn, block, 0, bytearray(40_000))

    rewrite(10)
    size = kept.disk_bytes()
    assert kept.disk_usage().reader.pid == 0
    with reading(tmp_path) as reader:
        seen = kept.disk_usage().reader
        assert (seen.pid, seen.held_bytes) == (reader.pid, 0)
        rewrite(10)
        held = kept.disk_usage().reader
        assert held.pid == reader.pid
        assert held.age_seconds > seen.age_seconds
        grown = kept.disk_bytes() - size
        assert grown > 5_000_000
        assert held.held_bytes == pytest.approx(10 * 20 * 40_000, rel=0.1)
        reader.communicate()
    assert kept.disk_usage().reader.pid == 0
    size = kept.disk_bytes()
    rewrite(20)
    assert kept.disk_bytes() == size, "the pages are used again"
    kept.close()


def test_pages_that_were_free_before_do_not_wait_for_a_reader(tmp_path: Path) -> None:
    """They are used again first, and as many others wait then: what is free does not grow."""
    kept = LmdbStorage(tmp_path)
    Shard(kept, shard=0, num_shards=1)

    def write(blocks: int) -> None:
        with kept.write() as txn:
            for block in range(blocks):
                put(txn, block, 0, bytearray(40_000))

    write(300)
    with kept.write() as txn:
        txn.clear("versions")
        txn.clear("blocks")
    for _ in range(4):
        write(20)
    free, size = kept.disk_usage().free, kept.disk_bytes()
    with reading(tmp_path) as reader:
        assert kept.disk_usage().reader.held_bytes == 0
        for _ in range(5):
            write(20)
        usage = kept.disk_usage()
        assert usage.reader.held_bytes == pytest.approx(5 * 20 * 40_000, rel=0.1)
        assert usage.free == pytest.approx(free, rel=0.1)
        assert kept.disk_bytes() == size
        reader.communicate()
    kept.close()


def test_the_shards_own_readers_are_none_of_them(tmp_path: Path) -> None:
    kept = LmdbStorage(tmp_path)
    Shard(kept, shard=0, num_shards=1)
    with kept.read():
        for block in range(3):
            with kept.write() as txn:
                put(txn, block, 0, bytearray(8_000))
        assert kept.disk_usage().reader.pid == 0
    kept.close()


def test_a_reader_is_seen_before_anybody_asks(tmp_path: Path) -> None:
    """Its age counts from the look of a shard's own thread."""
    looked = threading.Event()

    class Storage(LmdbStorage):
        def look_at_readers(self) -> None:
            super().look_at_readers()
            looked.set()

    kept = Storage(tmp_path)
    shard = Shard(kept, shard=0, num_shards=1)
    committer = Committer(shard.batch)
    with reading(tmp_path) as reader, closing(Sweeper(shard, committer)) as sweeper:
        sweeper.start()
        assert looked.wait(60)
        assert kept.disk_usage().reader.age_seconds > 0
        reader.communicate()
    committer.close()
    kept.close()


@pytest.mark.guard
def test_metrics_inspect_and_top_name_a_foreign_reader(tmp_path: Path) -> None:
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(TableSpec(num_rows=5_000, dim=32))
        client.extend_schedule(0, np.full(100, 0.01, np.float32))
        client.open_session("run")
        client.push_gradients(ROWS, ONES, step=0)
        address = cluster.metrics_addresses[0]
        assert metric(address, "weightserver_reader_pid") == 0
        with reading(tmp_path / "shard-0") as reader:
            assert metric(address, "weightserver_reader_pid") == reader.pid
            for step in range(1, 6):
                client.push_gradients(ROWS, ONES, step=step)
            assert metric(address, "weightserver_reader_age_seconds") > 0
            assert metric(address, "weightserver_reader_held_bytes") > 5e6
            held = metric(address, "weightserver_reader_held_bytes")
            wait_until(lambda: (noted_reader(tmp_path / "shard-0") or {}).get("held_bytes") == held)
            seen = inspect_directory(tmp_path / "shard-0")
            assert (seen["reader"]["pid"], seen["reader"]["held_bytes"]) == (reader.pid, held)
            assert 0 < seen["reader"]["age_seconds"] <= metric(address, "weightserver_reader_age_seconds")
            shown = weightserver("top", address, "--count", 1, "--interval-seconds", 1)
            assert f"shard 0 of 1: process {reader.pid} reads a state " in shown[1]
            reader.communicate()
        wait_until(lambda: metric(address, "weightserver_reader_pid") == 0)
        wait_until(lambda: noted_reader(tmp_path / "shard-0") is None)


def test_a_shard_that_was_killed_forgets_its_reader_when_it_starts(tmp_path: Path) -> None:
    note = tmp_path / "owner.lock"
    kept = LmdbStorage(tmp_path)
    last = last_transaction(tmp_path)
    assert last > 0
    with reading(tmp_path) as reader:
        kept.look_at_readers()
        as_killed = note.read_bytes()
        assert (noted_reader(tmp_path) or {})["pid"] == reader.pid
        assert last_transaction(tmp_path) == last
        reader.communicate()
    kept.close()
    assert noted_reader(tmp_path) is None
    note.write_bytes(as_killed)
    kept = LmdbStorage(tmp_path)
    assert noted_reader(tmp_path) is None
    kept.close()


def test_a_shard_that_ends_notes_a_reader_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that it notes it in would be closed, and its descriptor perhaps another file's."""
    kept = LmdbStorage(tmp_path)
    closing, note, failed = threading.Thread(target=kept.close), OwnerLock.note_reader, list[bool]()

    def note_late(lock: OwnerLock, reader: OldReader) -> None:
        if not closing.ident:
            closing.start()
            closing.join(0.2)
            failed.append(lock._descriptor is None)
        note(lock, reader)

    monkeypatch.setattr(OwnerLock, "note_reader", note_late)
    kept.look_at_readers()
    closing.join()
    assert failed == [False]


def test_the_table_of_readers_is_as_it_was_understood(tmp_path: Path) -> None:
    """LMDB tells of its readers in a text only."""
    with lmdb.open(str(tmp_path), lib_version=0) as environment:
        assert environment.readers() == "(no active readers)\n"
        with environment.begin() as txn:
            assert environment.readers().splitlines()[0].split() == ["pid", "thread", "txnid"]
            assert _snapshots(environment) == {(os.getpid(), txn.id())}
        assert environment.readers().splitlines()[1].split()[::2] == [str(os.getpid()), "-"]
        assert _snapshots(environment) == set()
