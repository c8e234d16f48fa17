"""`weightserver inspect` while a shard writes: it reads one moment, and delays no writer."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from weightserver.core.checkpoints import ShardCheckpoint
from weightserver.operations.inspect import inspect_directory
from weightserver.shard.shard import Shard
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import State, put_record, read_state, write_schedule, write_state
from weightserver.storage.snapshot import Snapshot, read_snapshot


@pytest.mark.guard
def test_a_killed_inspect_holds_no_space(tmp_path: Path) -> None:
    """Stops it with SIGSTOP at random moments of its reading, while every row is written repeatedly."""
    code = (
        "import sys; from pathlib import Path; from weightserver.operations.inspect import inspect_directory\n"
        "for number in range(10 ** 9):\n"
        "    inspect_directory(Path(sys.argv[1])); print(number, flush=True) if number < 2 else None"
    )
    kept = LmdbStorage(tmp_path)
    Shard(kept, shard=0, num_shards=1)
    sizes = []

    def write() -> None:
        for _ in range(20):
            with kept.write() as txn:
                for block in range(20):
                    txn.put_block(block, 0, bytearray(8_000))
        sizes.append(kept.disk_bytes())

    write()
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as inspect:
        assert inspect.stdout is not None
        assert inspect.stdout.readline() == "0\n"
        for number in range(8):
            time.sleep(random.Random(number).uniform(0, 0.004))
            inspect.send_signal(signal.SIGSTOP)
            write()
            inspect.send_signal(signal.SIGCONT)
        assert inspect.poll() is None
        inspect.kill()
    assert sizes[-1] <= 1.2 * sizes[0]
    kept.close()


@pytest.mark.guard
def test_inspect_reads_one_transaction(tmp_path: Path) -> None:
    """A shard writes all the time, with values of many pages."""
    kept = LmdbStorage(tmp_path)
    Shard(kept, shard=0, num_shards=1)
    stopped, count = threading.Event(), 0

    def write_all_the_time() -> None:
        number = 0
        while not stopped.is_set():
            number += 1
            names = tuple(
                ShardCheckpoint(
                    f"{number}", number, marks=(f"{n:016}:0",), generation=n, clock=n, rows_stored=number, num_rows=9
                )
                for n in range(number % 50)
            )
            with kept.write() as txn:
                write_state(txn, State(epoch=number, run=f"{number}", rows_stored=number, checkpoints=names))
                write_schedule(txn, 0, np.zeros(number, np.float32))
                put_record(txn, "writers", number.to_bytes(16), b"x" * 136)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_all_the_time)
        try:
            ends = time.monotonic() + 2
            while time.monotonic() < ends:
                seen = inspect_directory(tmp_path)
                told = {seen[name] for name in ("epoch", "rows_stored", "horizon", "writers")}
                assert told | {int(seen["run"] or 0)} | {int(name) for name in seen["checkpoints"]} == {seen["epoch"]}
                assert len(seen["checkpoints"]) == seen["epoch"] % 50
                count += 1
        finally:
            stopped.set()
        writing.result()
    assert min(count, seen["epoch"]) > 10
    kept.close()


def test_a_snapshot_is_read_again_once_its_pages_may_be_written_over(tmp_path: Path) -> None:
    """LMDB reuses the pages that a transaction frees two transactions later."""
    kept = LmdbStorage(tmp_path)
    Shard(kept, shard=0, num_shards=1)

    def calls(num_writes: int) -> int:
        epochs: list[int] = []

        def read(snapshot: Snapshot) -> int:
            for _ in range(0 if epochs else num_writes):
                with kept.write() as txn:
                    write_state(txn, State(epoch=read_state(txn).epoch + 1))
            epochs.append(json.loads(bytes(snapshot.get("meta", b"state") or b"")[8:])["epoch"])
            return epochs[-1]

        assert read_snapshot(tmp_path, read) == epochs[-1]
        return len(epochs)

    assert [calls(num_writes) for num_writes in (0, 1, 2, 3, 6)] == [1, 1, 2, 2, 2]
    kept.close()
