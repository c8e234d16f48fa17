"""`weightserver inspect` while a shard writes: it reads one moment, and delays no writer."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.stored import put
from weightserver import StorageError
from weightserver.core.checkpoints import ShardCheckpoint
from weightserver.operations.inspect import inspect_directory
from weightserver.shard.shard import Shard
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import State, put_record, read_state, write_state


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[LmdbStorage]:
    """A shard's directory, which this process serves."""
    with closing(LmdbStorage(tmp_path)) as storage:
        Shard(storage, shard=0, num_shards=1)
        yield storage


@pytest.mark.guard
def test_inspect_reads_one_transaction(kept: LmdbStorage, tmp_path: Path) -> None:
    """A shard writes all the time, with values of many pages."""
    stopped = threading.Event()

    def write_all_the_time() -> None:
        number = 0
        while not stopped.is_set():
            number += 1
            of = {"rows_stored": number, "clock": number, "epoch": number, "run": f"{number}"}
            checkpoints = tuple(
                ShardCheckpoint(f"{number}", number, marks=(MARK,), generation=n, rows_stored=number, num_rows=9)
                for n in range(number % 50)
            )
            with kept.write() as txn:
                write_state(txn, State(**of, checkpoints=checkpoints))  # type: ignore[arg-type]
                put_record(txn, "writers", number.to_bytes(16), b"x" * 136)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_all_the_time)
        try:
            for _ in range(8):
                seen = inspect_directory(tmp_path)
                told = {seen[name] for name in ("epoch", "rows_stored", "clock", "writers")}
                assert told | {int(seen["run"] or 0)} | {int(name) for name in seen["checkpoints"]} == {seen["epoch"]}
                assert len(seen["checkpoints"]) == seen["epoch"] % 50
        finally:
            stopped.set()
        writing.result()
    assert seen["epoch"] > 10


MARK = f"{0:016}:0"
ABORTS = [sys.executable, "-c", "import os; os.abort()"]
READER = """
import json, sys
from pathlib import Path
from weightserver.storage.snapshot import read_snapshot

def read(snapshot):
    epoch = json.loads(bytes(snapshot.get("meta", b"state"))[8:])["epoch"]
    print(epoch, flush=True)
    sys.stdin.readline()
    return epoch

print("found", read_snapshot(Path(sys.argv[1]), read), flush=True)
"""


@pytest.mark.parametrize("num_writes", [1, 2, 100])
def test_a_snapshot_is_read_again_once_its_pages_may_be_written_over(
    num_writes: int, kept: LmdbStorage, tmp_path: Path
) -> None:
    """LMDB reuses the pages that a transaction frees two transactions later. A reader that is stopped meanwhile keeps
    none: the file does not grow."""

    def write(count: int) -> None:
        for _ in range(count):
            with kept.write() as txn:
                write_state(txn, State(epoch=read_state(txn).epoch + 1))
                for block in range(20):
                    put(txn, block, 0, bytearray(8_000))

    write(20)
    size = kept.disk_bytes()
    command = [sys.executable, "-c", READER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        seen = [int(reader.stdout.readline())]
        write(num_writes)
        assert kept.disk_bytes() == size
        reader.stdin.write("go on\n")
        reader.stdin.flush()
        if num_writes > 1:
            seen.append(int(reader.stdout.readline()))
            reader.stdin.write("go on\n")
            reader.stdin.flush()
        assert reader.stdout.readline() == f"found {seen[-1]}\n"
    assert seen == ([20] if num_writes <= 1 else [20, 20 + num_writes])


def test_a_reader_that_ends_is_followed_by_another(
    kept: LmdbStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB ends a process whose pages are overwritten with what it does not expect."""
    run, ended = subprocess.run, list[list[str]]()

    def dies(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        ended.append(command)
        with kept.write() as txn:
            write_state(txn, State(epoch=len(ended)))
        return run(ABORTS if len(ended) < 3 else command, **options)

    monkeypatch.setattr(subprocess, "run", dies)
    assert inspect_directory(tmp_path)["epoch"] == 3

    monkeypatch.setattr(subprocess, "run", lambda _, **options: run(ABORTS, **options))
    with pytest.raises(
        StorageError, match=r"cannot be read \(its reader ended with status -6\): run 'weightserver verify'"
    ):
        inspect_directory(tmp_path)
