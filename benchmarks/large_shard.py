"""Measures a shard larger than memory: written, restarted, and read and written at random.

python -m benchmarks.large_shard [--rows 32000000] [--directory DIR] [--output benchmarks/results]

D = 128, one shard on this machine; 32 M rows take 33 GB of disk under --directory, and are removed at the end. A run
that is interrupted leaves the rows and its results there; repeating the command resumes it. Rows are written through a
client in runs of neighbours. Before the shard restarts, its file is dropped from the page cache.

The peer of the reads is the disk: as many blocks, read from the file by pread, in turn with the fetches. Memory is the
shard's own (RssAnon), sampled every 20 ms; mapped pages of the file are page cache, which the kernel reclaims when
needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import at_least, in_turn, read_bytes, restored, seconds, timing, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers
from weightserver.core.blocks import BlockCodec

DIM, NUM_STEPS = 128, 1_000
PAGE_BYTES = 4096
ROWS_PER_WRITE = 16_380
NUM_PARTS = 10
"""Parts of the fill, each with its own times and memory."""
VALUES = np.random.default_rng(0).standard_normal((2, 3 * ROWS_PER_WRITE, DIM), dtype=np.float32) * 0.01
FETCHES = {"65,536 rows at random": (65_536, 1), "512 rows at random": (512, 1), "16,380 neighbours": (1, 16_380)}
"""Name -> (number of runs of neighbouring rows, rows per run)."""
ROUNDS = {"65,536 rows at random": 3, "512 rows at random": 30, "16,380 neighbours": 30}


def first_value(row: int) -> int:
    """Index into VALUES of the piece that begins with `row`; differs between neighbouring pieces."""
    return row // ROWS_PER_WRITE * 977 % (2 * ROWS_PER_WRITE)


class Memory:
    """Samples the largest private memory of this thread's child processes, in bytes."""

    def __init__(self) -> None:
        self._children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
        self._most = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.02):
            for pid in self._children.read_text().split():
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")]
                    self._most = max(self._most, *found, 0)

    def most(self) -> int:
        """The largest sample since the last call."""
        time.sleep(0.05)
        most, self._most = self._most, 0
        return most

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()


def map_bytes(cluster: LocalCluster) -> int:
    """Size of the shard's memory map of its file."""
    with urllib.request.urlopen(f"http://{cluster.metrics_addresses[0]}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(int(float(line.split()[-1])) for line in lines if line.startswith("weightserver_map_bytes"))


def drop_from_page_cache(data: Path) -> None:
    """Drops the file from the page cache, which requires that no process maps it."""
    with data.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Benchmark:
    """One shard's data, and the results so far, in `directory`."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        self.directory, self.data = directory, directory / "shard-0" / "data.mdb"
        self.spec = TableSpec(num_rows=num_rows, dim=DIM)
        self.generator = np.random.default_rng(1)
        self._path = directory / "results.json"
        self.results: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def stage(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Runs one stage unless its result is stored."""
        if name not in self.results:
            print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
            self.results[name] = measure()
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self.results, default=vars))
            partial.replace(self._path)

    def run(self) -> None:
        self.stage("fill", self.fill)
        self.stage("restart", self.restart)
        self.stage("reads", self.reads)
        self.stage("writes", self.writes)

    @contextmanager
    def served(self) -> Iterator[tuple[LocalCluster, WeightClient, Memory]]:
        with (
            closing(Memory()) as memory,
            LocalCluster(1, self.directory) as cluster,
            WeightClient(cluster.addresses, timeout_seconds=200) as client,
        ):
            yield cluster, client, memory

    # ---- what is measured

    def fill(self) -> dict[str, Any]:
        """Writes every row; a resumed fill measures only the rest."""
        parts = []
        with self.served() as (cluster, client, memory):
            client.create_table(self.spec)
            client.extend_schedule(0, np.full(NUM_STEPS, 0.01, np.float32))
            client.open_session("fill")
            pieces = range(0, self.spec.num_rows, ROWS_PER_WRITE)
            stored = client.describe().rows_stored // ROWS_PER_WRITE
            left = pieces[min(stored, len(pieces) - 2) :]  # two at least, which have a spread
            for part in np.array_split(left, min(NUM_PARTS, len(left) // 2)):
                times = [seconds(self._write_piece, client, int(row)) for row in part]
                parts.append(
                    {
                        "rows_stored": client.describe().rows_stored,
                        "rows": min(int(part[-1]) + ROWS_PER_WRITE, self.spec.num_rows) - int(part[0]),
                        "write": timing(times),
                        "write_seconds_most": max(times),
                        "seconds": sum(times),
                        "own_bytes": memory.most(),
                        "file_bytes": self.data.stat().st_size,
                        "map_bytes": map_bytes(cluster),
                    }
                )
                print(f"{parts[-1]}", file=sys.stderr, flush=True)
        return {"parts": parts}

    def _write_piece(self, client: WeightClient, first: int) -> None:
        rows = np.arange(first, min(first + ROWS_PER_WRITE, self.spec.num_rows))
        start = first_value(first)
        weight, momentum = VALUES[:, start : start + len(rows)]
        client.write_state(rows, weight, momentum, 0)

    def restart(self) -> dict[str, Any]:
        """Restarts the shard with a cold page cache, then with a warm one."""
        times = []
        for cold in (True, False):
            if cold:
                drop_from_page_cache(self.data)
            started = time.perf_counter()
            with closing(Memory()) as memory, LocalCluster(1, self.directory):
                times.append(time.perf_counter() - started)
                own_bytes = memory.most()
        return {"cold_seconds": times[0], "warm_seconds": times[1], "own_bytes": own_bytes}

    def reads(self) -> dict[str, Any]:
        """Times fetches of rows anywhere, and the disk's own reads of as many blocks."""
        drop_from_page_cache(self.data)
        results: dict[str, Any] = {}
        with self.served() as (cluster, client, memory):
            disk = os.open(self.data, os.O_RDONLY)
            os.posix_fadvise(disk, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
            for name, (num_runs, length) in FETCHES.items():
                num_blocks, read_before = [0], read_bytes(cluster.processes)

                def fetch(num_runs: int = num_runs, length: int = length, counted: list[int] = num_blocks) -> None:
                    counted[0] = self._fetch(client, num_runs, length)

                def pread(counted: list[int] = num_blocks, length: int = length) -> None:
                    self._read_blocks(disk, counted[0], neighbours=length > 1)

                times = in_turn({"fetch": fetch, "disk": pread}, rounds=ROUNDS[name], warm_up=1)
                results[name] = times | {
                    "rows": num_runs * length,
                    "blocks": num_blocks[0],
                    "read_bytes": (read_bytes(cluster.processes) - read_before) / (ROUNDS[name] + 1),
                    "own_bytes": memory.most(),
                }
            os.close(disk)
            results["map_bytes"] = map_bytes(cluster)
        return results

    def _fetch(self, client: WeightClient, num_runs: int, length: int) -> int:
        """Fetches runs of rows, checks their values, and returns the number of blocks that they lie in."""
        starts = self.generator.integers(self.spec.num_rows - length, size=num_runs)
        rows = np.unique(starts[:, None] + np.arange(length))
        found = client.fetch(rows, step=0)
        pieces = rows // ROWS_PER_WRITE
        written = pieces * 977 % (2 * ROWS_PER_WRITE) + rows % ROWS_PER_WRITE
        if not np.array_equal(found, VALUES[0, written]):
            raise RuntimeError("fetched rows differ from those written")
        return len(np.unique(rows // self.spec.rows_per_block))

    def _read_blocks(self, descriptor: int, count: int, *, neighbours: bool) -> None:
        """Reads `count` blocks, neighbours or anywhere."""
        num_bytes = BlockCodec(self.spec).num_bytes
        most = self.data.stat().st_size // num_bytes - count
        blocks = self.generator.integers(most) + np.arange(count) if neighbours else self.generator.choice(most, count)
        for block in blocks.tolist():
            os.pread(descriptor, num_bytes, block * num_bytes // PAGE_BYTES * PAGE_BYTES)

    def writes(self) -> dict[str, Any]:
        """Times pushes anywhere, which read the rows that they change."""
        gradients = np.ones((ROWS_PER_WRITE, DIM), np.float32)
        results: dict[str, Any] = {}
        steps = itertools.count()
        with self.served() as (_, client, memory):
            client.extend_schedule(0, np.full(NUM_STEPS, 0.01, np.float32))
            client.open_session("push")
            for name, (num_runs, length) in {"512 rows at random": (512, 1), "16,380 neighbours": (1, 16_380)}.items():

                def push(num_runs: int = num_runs, length: int = length) -> None:
                    starts = self.generator.integers(self.spec.num_rows - length, size=num_runs)
                    rows = np.unique(starts[:, None] + np.arange(length))
                    client.push_gradients(rows, gradients[: len(rows)], step=next(steps))

                results[name] = in_turn({"push": push}, rounds=10, warm_up=1) | {"own_bytes": memory.most()}
            results["file_bytes"] = self.data.stat().st_size
        return results


def as_table(num_rows: int, results: dict[str, Any]) -> str:
    last, restart = results["fill"]["parts"][-1], results["restart"]
    memory_bytes = psutil.virtual_memory().total + psutil.swap_memory().total
    return "\n".join(
        [
            f"One shard of {num_rows:,} rows (D = {DIM}): {last['file_bytes'] / 1e9:.1f} GB on a machine whose memory "
            f"and swap are {memory_bytes / 1e9:.1f} GB; LMDB's map was {last['map_bytes'] / 1e9:.1f} GB at the end. "
            "Memory is the shard's own, at most; mapped pages of the file are page cache.",
            *_fill_lines(results["fill"]),
            "",
            f"Restarted: {restart['cold_seconds']:.1f} s with nothing of the file in the page cache, "
            f"{restart['warm_seconds']:.1f} s right after that; own memory {_megabytes(restart['own_bytes'])}.",
            *_read_lines(results["reads"]),
            *_write_lines(results["writes"]),
        ]
    )


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def _fill_lines(fill: dict[str, Any]) -> Iterator[str]:
    yield from (
        "",
        f"Filled by writes of {ROWS_PER_WRITE:,} neighbouring rows:",
        "",
        "| rows stored | file | map | a write | slowest | rows a second | own memory |",
        "|---|---|---|---|---|---|---|",
    )
    for part in fill["parts"]:
        yield (
            f"| {part['rows_stored']:,} | {part['file_bytes'] / 1e9:.1f} GB | {part['map_bytes'] / 1e9:.1f} GB | "
            f"{part['write']} | {1e3 * part['write_seconds_most']:.0f} ms | {part['rows'] / part['seconds']:,.0f} | "
            f"{_megabytes(part['own_bytes'])} |"
        )


def _read_lines(reads: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "| fetch | blocks | time | the disk alone | ratio | read from disk, a fetch | own memory |"
    yield "|---|---|---|---|---|---|---|"
    for name in FETCHES:
        read = reads[name]
        yield (
            f"| {name} | {read['blocks']:,} | {read['fetch']} | {read['disk']} | "
            f"{read['fetch'].p50 / read['disk'].p50:.2f} | {_megabytes(read['read_bytes'])} | "
            f"{_megabytes(read['own_bytes'])} |"
        )


def _write_lines(writes: dict[str, Any]) -> Iterator[str]:
    yield from ("", "| push | time | own memory |", "|---|---|---|")
    for name, written in writes.items():
        if isinstance(written, dict):
            yield f"| {name} | {written['push']} | {_megabytes(written['own_bytes'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=at_least(2 * NUM_PARTS * ROWS_PER_WRITE), default=32_000_000)
    parser.add_argument("--directory", type=Path, help="for the shard's data; a temporary one by default")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    directory = arguments.directory or Path(tempfile.gettempdir()) / f"large-shard-{arguments.rows}"
    directory.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(directory, arguments.rows)
    there = benchmark.data.stat().st_blocks * 512 if benchmark.data.exists() else 0
    wanted = round(1.1 * benchmark.spec.num_blocks * BlockCodec(benchmark.spec).num_bytes) - there
    if shutil.disk_usage(directory).free < wanted:
        sys.exit(f"{directory} needs {wanted / 1e9:.0f} GB of free disk: give another --directory, or fewer --rows")
    keep_large_buffers()
    benchmark.run()
    results = restored(json.loads(json.dumps(benchmark.results, default=vars)))
    command = f"python -m benchmarks.large_shard --rows {arguments.rows}"
    write_results(arguments.output, "large_shard", command, results, as_table(arguments.rows, results))
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
