"""Measures what checkpoints cost: taking one, rolling back to one, and the disk space of those kept.

python -m benchmarks.checkpoints [--rows 10000000] [--directory DIR] [--output benchmarks/results]

D = 128, two shards on this machine; 10 M stored rows take about 13 GB of disk, under --directory, and are removed.
A checkpoint is timed while the table is filled, in turn with its peer, a durable write of one row to each shard; a
rollback's peer is the pushes that it undoes. Then come long runs of a trainer's writes over a small table, every row
written in many passes, with three checkpoints kept, to see whether the file stops growing.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Timing, at_least, in_turn, seconds, timing, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers

DIM, KEEP, GOAL_SECONDS, NUM_STEPS = 128, 3, 0.1, 100_000
ROWS_PER_WRITE = 1 << 14
LONG_ROWS, LONG_CHECKPOINTS = 300_000, 120
WINDOW_SIZE, WINDOW_STRIDE, STRIDES_PER_CHECKPOINT = 32_768, 8_192, 4
BLOCK_BYTES = 16 * 4096
VALUES = np.random.default_rng(0).standard_normal((2, WINDOW_SIZE, DIM), dtype=np.float32) * 0.01
SHARDS_WRITE = "write of a row to each shard"


@contextmanager
def table(num_rows: int, directory: Path | None) -> Iterator[WeightClient]:
    """A new table on two shards, whose data are removed at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="checkpoints-", dir=directory) as data,
        LocalCluster(2, data) as cluster,
        WeightClient(cluster.addresses) as client,
    ):
        client.create_table(TableSpec(num_rows=num_rows, dim=DIM))
        client.extend_schedule(0, np.full(NUM_STEPS, 0.06, np.float32))
        client.open_session("benchmark")
        yield client


class Kept:
    """Takes checkpoints; releases those before the newest KEEP."""

    def __init__(self, client: WeightClient) -> None:
        self._client = client
        self._step = -1
        self.names: list[str] = []

    def take(self, step: int = 0) -> None:
        """Takes a checkpoint at `step`, or one step after the last checkpoint."""
        self._step = max(self._step + 1, step)
        self._client.checkpoint(f"checkpoint {self._step}", step=self._step)
        self.names.append(f"checkpoint {self._step}")

    def release_old(self) -> None:
        while len(self.names) > KEEP:
            self._client.release(self.names.pop(0))


def write(client: WeightClient, rows: np.ndarray, step: int = 0) -> None:
    client.write_state(rows, VALUES[0, : len(rows)], VALUES[1, : len(rows)], step)


def push(client: WeightClient, rows: np.ndarray) -> None:
    client.push_gradients(rows, VALUES[0, : len(rows)], step=1)


def in_pieces(call: Callable[[WeightClient, np.ndarray], None], client: WeightClient, first: int, end: int) -> None:
    for start in range(first, end, ROWS_PER_WRITE):
        call(client, np.arange(start, min(start + ROWS_PER_WRITE, end)))


def growing_table(num_rows: int, directory: Path | None, rounds: int) -> dict[str, Any]:
    """Times checkpoints at several sizes of one table, and rollbacks at the two largest."""
    sizes = [10**power for power in range(4, 12) if 10**power < num_rows] + [num_rows]
    results: dict[str, Any] = {"sizes": {}, "fill_seconds": 0.0}
    generator = np.random.default_rng(1)
    with table(num_rows, directory) as client:
        kept = Kept(client)
        on_each_shard = np.array([0, client.describe().spec.rows_per_block])
        for before, size in itertools.pairwise([0, *sizes]):
            results["fill_seconds"] += seconds(in_pieces, write, client, before, size)
            some = np.arange(min(size, ROWS_PER_WRITE))
            calls: dict[str, Callable[[], object]] = {
                "rows": lambda some=some, size=size: write(client, some + generator.integers(size - len(some) + 1)),
                "checkpoint": kept.take,
                SHARDS_WRITE: lambda: write(client, on_each_shard),
                "write of one row": lambda: write(client, on_each_shard[:1]),
                "release": kept.release_old,
            }
            info = client.describe()
            assert info.rows_stored == size
            result: dict[str, Any] = {"disk_bytes": info.disk_bytes, "times": in_turn(calls, rounds=rounds)}
            if size in sizes[-2:]:
                counts = [0, *(10**power for power in range(3, 7) if 10**power <= sizes[-2])]
                result["rollbacks"] = {count: rollbacks(client, kept, size, count) for count in counts}
            results["sizes"][size] = result
    return results


def rollbacks(client: WeightClient, kept: Kept, num_stored: int, count: int, rounds: int = 5) -> dict[str, Timing]:
    """Times pushes to `count` neighbouring rows in the middle of the stored ones, and their rollback."""
    first = (num_stored - count) // 2
    kept.take()
    kept.release_old()
    times: dict[str, list[float]] = {"pushes": [], "rollback": []}
    for _ in range(rounds):
        times["pushes"].append(seconds(in_pieces, push, client, first, first + count))
        times["rollback"].append(seconds(client.rollback, kept.names[-1]))
    return {what: timing(values) for what, values in times.items()}


def long_run(directory: Path | None, *, flush: bool = False) -> dict[str, Any]:
    """Writes the rows that leave a moving window, S at a time; with `flush` also the window at each checkpoint."""
    sizes, write_seconds, checkpoint_seconds = [], [], []
    with table(LONG_ROWS, directory) as client:
        kept = Kept(client)
        for step in range(1, STRIDES_PER_CHECKPOINT * LONG_CHECKPOINTS + 1):
            leaving = ((step - 1) * WINDOW_STRIDE + np.arange(WINDOW_STRIDE)) % LONG_ROWS
            write_seconds.append(seconds(write, client, leaving, step))
            if step % STRIDES_PER_CHECKPOINT == 0:
                if flush:
                    write(client, (step * WINDOW_STRIDE + np.arange(WINDOW_SIZE)) % LONG_ROWS, step)
                checkpoint_seconds.append(seconds(kept.take, step))
                kept.release_old()
                sizes.append(client.describe().disk_bytes)
        info = client.describe()
        return {
            "disk_bytes": sizes,
            "rows_bytes": info.rows_stored * BLOCK_BYTES // info.spec.rows_per_block,
            "write": timing(write_seconds),
            "checkpoint": timing(checkpoint_seconds),
        }


def as_table(growing: dict[str, Any], runs: dict[str, dict[str, Any]]) -> str:
    sizes, most = growing["sizes"], max(growing["sizes"])
    return "\n".join(
        [
            "Medians, with the 10th and 90th percentile. Goal: a checkpoint of 10 M stored rows takes less than "
            f"{1e3 * GOAL_SECONDS:.0f} ms; with {most:,} it takes {sizes[most]['times']['checkpoint']}. "
            f"Writing these rows took {growing['fill_seconds']:.0f} s.",
            *_checkpoint_lines(sizes),
            *_rollback_lines(sizes),
            *_long_run_lines(runs),
        ]
    )


def _checkpoint_lines(sizes: dict[int, dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield (
        f"Each checkpoint follows a write of {ROWS_PER_WRITE:,} neighbouring rows (10,000 in the first line). The "
        "floor is a durable write of one row to each of the two shards: a commit on both, as a checkpoint is."
    )
    yield ""
    yield "| rows stored | on disk | checkpoint | floor | checkpoint / floor | write of one row | release |"
    yield "|---|---|---|---|---|---|---|"
    for size, result in sizes.items():
        _, taken, floor, one, release = result["times"].values()
        gigabytes = f"{result['disk_bytes'] / 1e9:.2f} GB"
        yield f"| {size:,} | {gigabytes} | {taken} | {floor} | {taken.p50 / floor.p50:.2f} | {one} | {release} |"


def _rollback_lines(sizes: dict[int, dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield (
        "A rollback after pushes to neighbouring rows costs what was written since, not what is stored, if it takes "
        "the same time at both sizes of the table:"
    )
    yield ""
    yield "| rows stored | rows pushed since | rollback | the pushes | rollback / pushes |"
    yield "|---|---|---|---|---|"
    for size, result in sizes.items():
        for count, times in result.get("rollbacks", {}).items():
            peer = f"{times['pushes']} | {times['rollback'].p50 / times['pushes'].p50:.3f}" if count else "– | –"
            yield f"| {size:,} | {count:,} | {times['rollback']} | {peer} |"


def _long_run_lines(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    left = STRIDES_PER_CHECKPOINT * WINDOW_STRIDE
    yield ""
    yield (
        f"Long runs: {LONG_CHECKPOINTS} checkpoints of {LONG_ROWS:,} rows, {KEEP} kept. Between two, {left:,} rows "
        f"leave the window, {WINDOW_STRIDE:,} a write, so each is written in {LONG_CHECKPOINTS * left // LONG_ROWS} "
        f"passes; with the flush, the {WINDOW_SIZE:,} rows of the window are written at each checkpoint too. Versions "
        "of a block are dropped when it is next written: one written in v generations a pass holds 1 + min(v, "
        f"{KEEP}) versions until the next pass, whatever was released. That is 2 where rows only leave, 3 with the "
        f"flush, and at most {KEEP + 1}, the bound; the writes in progress come on top."
    )
    yield ""
    yield (
        "| writes | rows · bytes | after pass 1 | after pass 2 | largest | last | largest / rows | bound / rows | "
        "checkpoint | write of rows that leave |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, run in runs.items():
        disk, stored = run["disk_bytes"], run["rows_bytes"]
        passes = [disk[-(-number * LONG_ROWS // left) - 1] for number in (1, 2)]
        megabytes = " | ".join(f"{size / 1e6:.0f} MB" for size in (stored, *passes, max(disk), disk[-1]))
        ratio = f"{max(disk) / stored:.2f} | {KEEP + 1}"
        yield f"| {name} | {megabytes} | {ratio} | {run['checkpoint']} | {run['write']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=at_least(10_001), default=10_000_000)
    parser.add_argument("--rounds", type=at_least(2), default=50)
    parser.add_argument("--directory", type=Path, help="for the shards' data; the system's temporary one by default")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the data are removed
    keep_large_buffers()
    growing = growing_table(arguments.rows, arguments.directory, arguments.rounds)
    runs = {
        "rows leave": long_run(arguments.directory),
        "rows leave, window flushed": long_run(arguments.directory, flush=True),
    }
    command = f"python -m benchmarks.checkpoints --rows {arguments.rows} --rounds {arguments.rounds}"
    results = {**growing, "long_runs": runs}
    write_results(arguments.output, "checkpoints", command, results, as_table(growing, runs))


if __name__ == "__main__":
    main()
