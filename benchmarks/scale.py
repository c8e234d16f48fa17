"""Measures step time and trainer memory from a million to a billion rows.

python -m benchmarks.scale [--steps 30] [--stored-rows 4000000] [--output benchmarks/results]

Whole training steps (generated images, a small encoder, B 512, K 65,536, W 131,072, S 16,384, D 128, two shards on this
machine), resident rows. Fresh tables of 10^6 ... 10^9 rows; then shards that hold `--stored-rows` rows, written through
write_state, in a memory cgroup too small to cache a fifth of them, with nothing cached when training begins, so that
every entering row comes from disk (needs root, and cgroups of version 1). The peer is `dense`, as long as its rows fit
into memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import at_least, read_bytes, timing, write_results
from weightserver import LocalCluster, TableSpec, WeightClient

DIM, BATCH_SIZE = 128, 512
SIZES = (10**6, 10**7, 10**8, 10**9)
CGROUPS = Path("/sys/fs/cgroup/memory")
CACHED_PART = 1 / 5
WARM_UP = 5
# The trainer refuses servers that hold rows of another run, as the prefilled ones do.
TRAINER = (
    "from weightserver.torch.table import Table; Table._unwritten = lambda table, client: None; "
    "from trainer.__main__ import main; main()"
)


def train(num_rows: int, steps: int, *options: str) -> dict[str, Any]:
    """Seconds of each step and peak memory of a run in its own process."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "run"
        command = [sys.executable, "-c", TRAINER, "synthetic", "--num-images", str(num_rows), "--steps", str(steps)]
        command += ["--rows-per-block", "63", "--log-every", "1", "--output", str(output), *options]
        subprocess.run(command, check=True, capture_output=True)
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
        summary = json.loads((output / "summary.json").read_text())
    seconds = [record["seconds"] for record in records]
    return {
        "rows": num_rows,
        "seconds": seconds,
        "row_wait_seconds": sum(record["row_wait_seconds"] for record in records),
        "fetched_rows_per_step": sum(record["fetched_rows"] for record in records) / len(records),
        "trainer_bytes": summary["peak_memory_bytes"],
    }


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the runs of one case into one result."""
    seconds = [second for run in runs for second in run["seconds"]]
    wait_seconds = sum(run["row_wait_seconds"] for run in runs)
    rest = {name: value for name, value in runs[-1].items() if name not in ("seconds", "row_wait_seconds")}
    return rest | {"step": timing(seconds), "row_wait_share": wait_seconds / sum(seconds)}


@contextmanager
def memory_limit(processes: list[Any], num_bytes: int) -> Iterator[None]:
    """Keeps each process, page cache included, below `num_bytes`."""
    groups = []
    for process in processes:
        group = CGROUPS / f"benchmark-{process.pid}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        (group / "cgroup.procs").write_text(str(process.pid))
        groups.append(group)
    try:
        yield
    finally:
        for process, group in zip(processes, groups, strict=True):
            (CGROUPS / "cgroup.procs").write_text(str(process.pid))
            (group / "memory.force_empty").write_text("0")
            group.rmdir()


def train_on_full_shards(num_rows: int, steps: int) -> dict[str, Any]:
    """Like `train`, on two shards that store every row and can cache `CACHED_PART` of them."""
    spec = TableSpec(num_rows=num_rows, dim=DIM)
    limit = round(num_rows * (8 * DIM + 8) / 2 * CACHED_PART)
    with LocalCluster(2) as cluster, memory_limit(cluster.processes, limit), WeightClient(cluster.addresses) as client:
        client.create_table(spec)
        client.extend_schedule(0, np.zeros(1, np.float32))
        client.open_session("fill")
        generator = np.random.default_rng(0)
        values = generator.standard_normal((2, 1 << 14, DIM), dtype=np.float32) * 0.01
        for first in range(0, num_rows, 1 << 14):
            rows = np.arange(first, min(first + (1 << 14), num_rows))
            client.write_state(rows, values[0, : len(rows)], values[1, : len(rows)], 0)
        for shard in range(2):
            with (cluster.directory / f"shard-{shard}" / "data.mdb").open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_before = read_bytes(cluster.processes)
        result = train(num_rows, steps, "--servers", ",".join(cluster.addresses))
        info = client.describe()
        return result | {
            "stored_rows": info.rows_stored,
            "disk_bytes": info.disk_bytes,
            "memory_limit_bytes_per_shard": limit,
            "read_bytes_per_step": (read_bytes(cluster.processes) - read_before) / steps,
        }


def dense_fits(num_rows: int) -> bool:
    """Whether weights, gradients, momentum and temporaries of SGD fit into memory."""
    return 6 * 4 * DIM * num_rows < 0.8 * psutil.virtual_memory().available


def measure(steps: int, stored_rows: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Results by row store and table."""
    on_disk = os.geteuid() == 0 and CGROUPS.is_dir()
    fresh: dict[int, list[dict[str, Any]]] = {num_rows: [] for num_rows in SIZES}
    from_disk: list[dict[str, Any]] = []
    for _ in range(rounds):
        for num_rows in SIZES:
            fresh[num_rows].append(train(num_rows, steps))
        if on_disk:
            from_disk.append(train_on_full_shards(stored_rows, steps))
    return {
        "resident, fresh table": [merged(runs) for runs in fresh.values()],
        "resident, from disk": [merged(from_disk)] if from_disk else [],
        "dense": [
            merged([train(num_rows, WARM_UP + 5, "--rows", "dense")]) for num_rows in SIZES if dense_fits(num_rows)
        ],
    }


def as_table(cases: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| rows | N | time of a step | waiting for rows | rows fetched, a step | trainer's peak memory |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {result['rows']:,} | {result['step']} | {result['row_wait_share']:.2%} | "
        f"{result['fetched_rows_per_step']:.1f} | {result['trainer_bytes'] / 2**30:.2f} GiB |"
        for name, results in cases.items()
        for result in results
    ]
    lines += ["", *(_about_disk(result) for result in cases["resident, from disk"])]
    block_bytes = 16 * 4096
    largest = max((result["rows"] for result in cases["dense"]), default=0)
    lines += [
        f"Dense rows do not fit into this machine's memory beyond N = {largest:,}. "
        f"Disk that 10⁹ stored rows take: 10⁹ / 63 rows a block · {block_bytes:,} bytes = "
        f"{1e9 / 63 * block_bytes / 1e12:.2f} TB, over all shards.",
    ]
    return "\n".join(lines)


def _about_disk(result: dict[str, Any]) -> str:
    return (
        f"From disk: {result['stored_rows']:,} rows stored in {result['disk_bytes'] / 1e9:.2f} GB; a shard may use "
        f"{result['memory_limit_bytes_per_shard'] / 1e6:.0f} MB of memory, page cache included. "
        f"Read from disk: {result['read_bytes_per_step'] / 1e6:.2f} MB a step."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument("--steps", type=at_least(WARM_UP + 2), default=30)
    parser.add_argument("--stored-rows", type=int, default=4_000_000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    cases = measure(arguments.steps, arguments.stored_rows, arguments.rounds)
    command = f"python -m benchmarks.scale --rounds {arguments.rounds} --steps {arguments.steps}"
    command += f" --stored-rows {arguments.stored_rows}"
    write_results(arguments.output, "scale", command, cases, as_table(cases))


if __name__ == "__main__":
    main()
