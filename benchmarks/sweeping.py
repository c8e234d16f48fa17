"""Measures what sweeping old versions of blocks frees, how fast, and what it costs concurrent fetches and pushes.

python -m benchmarks.sweeping [--rows 300000] [--checkpoints 200] [--cost-rows 300000]
                              [--directory DIR] [--output benchmarks/results]

D = 128, one shard on this machine. The same writes, with three checkpoints kept, go to a shard that sweeps and to one
whose sweeper never starts, as fast as they accept them: a trainer's writes leave more time. Then one checkpoint of all
rows is released, first without other calls, then during fetches and pushes that alternate with those to a shard that
does not sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from matplotlib import pyplot as plt

from benchmarks.checkpoints import BLOCK_BYTES, DIM, KEEP, NUM_STEPS, Kept, in_pieces, push, seconds, write
from benchmarks.measure import Timing, at_least, timing, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers

STRIDES_PER_CHECKPOINT, ROUNDS = 4, 5
ROWS_PER_WRITE = 1 << 15


class UnsweptCluster(LocalCluster):
    """A cluster whose shards never sweep."""

    _program: ClassVar[list[str]] = [
        sys.executable,
        "-c",
        "from weightserver import cli; from weightserver.shard import sweeper; sweeper._IDLE_SECONDS = 1e6; cli.main()",
    ]


@contextlib.contextmanager
def table(
    kind: type[LocalCluster], num_rows: int, directory: Path | None
) -> Iterator[tuple[LocalCluster, WeightClient]]:
    with (
        tempfile.TemporaryDirectory(prefix="sweeping-", dir=directory) as data,
        kind(1, data) as cluster,
        WeightClient(cluster.addresses) as client,
    ):
        client.create_table(TableSpec(num_rows=num_rows, dim=DIM))
        client.extend_schedule(0, np.full(NUM_STEPS, 0.06, np.float32))
        client.open_session("benchmark")
        in_pieces(write, client, 0, num_rows)
        yield cluster, client


# ---- space


def moving_window(client: WeightClient, number: int, num_rows: int) -> None:
    """Writes as a trainer does: rows that leave the window, a ninth of all, and at the checkpoint those in it."""
    size, stride = num_rows // 9, num_rows // 36
    for first in np.arange(STRIDES_PER_CHECKPOINT) * stride + number * STRIDES_PER_CHECKPOINT * stride:
        write(client, np.sort((first + np.arange(stride)) % num_rows), number)
    write(client, np.sort((first + stride + np.arange(size)) % num_rows), number)


def half_of_the_rows(client: WeightClient, number: int, num_rows: int) -> None:
    """Writes a random half of the blocks."""
    blocks = np.random.default_rng(number).permutation(num_rows // 63)[: num_rows // 126]
    rows = np.sort((blocks[:, None] * 63 + np.arange(63)).reshape(-1))
    for part in np.array_split(rows, -(-len(rows) // ROWS_PER_WRITE)):
        write(client, part, number)


def every_row(client: WeightClient, number: int, num_rows: int) -> None:
    """Writes all rows."""
    for first in range(0, num_rows, ROWS_PER_WRITE):
        write(client, np.arange(first, min(first + ROWS_PER_WRITE, num_rows)), number)


PATTERNS = {"a trainer's window": moving_window, "half of the rows": half_of_the_rows, "every row": every_row}


def space(kind: type[LocalCluster], pattern: Any, num_rows: int, num: int, directory: Path | None) -> dict[str, Any]:
    sizes, write_seconds = [], []
    with table(kind, num_rows, directory) as (_, client):
        kept = Kept(client)
        for number in range(num):
            write_seconds.append(seconds(pattern, client, number, num_rows))
            kept.take()
            kept.release_old()
            sizes.append(client.describe().disk_bytes)
        return {"disk_bytes": sizes, "write": timing(write_seconds)}


# ---- cost


def metric(cluster: LocalCluster, name: str) -> float:
    with urllib.request.urlopen(f"http://{cluster.metrics_addresses[0]}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def spent(cluster: LocalCluster) -> tuple[float, int]:
    """Processor seconds and bytes written by the shard so far."""
    process = Path(f"/proc/{cluster.processes[0].pid}")
    times = process.joinpath("stat").read_text().rpartition(")")[2].split()
    written = process.joinpath("io").read_text().partition("\nwrite_bytes: ")[2].split()[0]
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"), int(written)


BLOCKS = 'weightserver_lmdb_bytes{pages="blocks"'


def cost(num_rows: int, directory: Path | None) -> dict[str, Any]:
    with table(LocalCluster, num_rows, directory) as (cluster, client):
        every_row(client, 0, num_rows)
        kept = Kept(client)
        kept.take()
        every_row(client, 2, num_rows)
        before, started, cpu = metric(cluster, BLOCKS), time.perf_counter(), spent(cluster)
        client.release(kept.names.pop())
        while metric(cluster, BLOCKS) > 0.51 * before:
            time.sleep(0.05)
        alone_seconds = time.perf_counter() - started
        alone = [now - then for now, then in zip(spent(cluster), cpu, strict=True)]
        freed = before - metric(cluster, BLOCKS)

        return {
            "freed_bytes": freed,
            "seconds": alone_seconds,
            "processor_seconds": alone[0],
            "written_bytes": alone[1],
            "calls": latencies(num_rows, directory),
        }


def latencies(num_rows: int, directory: Path | None) -> dict[str, dict[str, Timing]]:
    """Times calls to a shard that sweeps and one that does not, in turn, until the sweep ends, ROUNDS times."""
    generator, steps = np.random.default_rng(0), itertools.count(2)
    kinds = {"not": UnsweptCluster, "sweeping": LocalCluster}
    calls = {
        "fetch of 512 rows": lambda client, rows: client.fetch(rows[:512], step=NUM_STEPS),
        "fetch of 65,536 rows": lambda client, rows: client.fetch(rows, step=NUM_STEPS),
        "push to 512 rows": lambda client, rows: push(client, rows[:512]),
    }
    times: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in calls}
    with contextlib.ExitStack() as stack:
        tables = {kind: stack.enter_context(table(program, num_rows, directory)) for kind, program in kinds.items()}
        all_kept = {kind: Kept(client) for kind, (_, client) in tables.items()}
        for step in itertools.islice(steps, ROUNDS):
            for kind, (_, client) in tables.items():
                all_kept[kind].take()
                every_row(client, step, num_rows)
            swept = tables["sweeping"][0]
            before = metric(swept, BLOCKS)
            for kind, (_, client) in tables.items():
                client.release(all_kept[kind].names.pop())
            while metric(swept, BLOCKS) == before:
                time.sleep(0.01)
            while metric(swept, BLOCKS) > 0.53 * before:
                rows = generator.integers(num_rows - 65_536) + np.arange(65_536)
                for name, call in calls.items():
                    for kind, (_, client) in tables.items():
                        times[name][kind].append(seconds(call, client, rows))
    return {name: {kind: timing(values) for kind, values in both.items()} for name, both in times.items()}


def as_table(num_rows: int, num: int, spaces: dict[str, dict[str, dict[str, Any]]], costs: dict[str, Any]) -> str:
    stored = num_rows * BLOCK_BYTES / 63
    lines = [
        f"{num_rows:,} rows, {stored / 1e6:.0f} MB; {num} checkpoints, {KEEP} kept; file over rows, as the writes come "
        "one after the other without a pause. Medians, with the 10th and 90th percentile.",
        "",
        "| written between two checkpoints | largest, unswept | last, unswept | largest, swept | last, swept | "
        "the writes, unswept | swept |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in spaces.items():
        unswept, swept = runs["unswept"], runs["swept"]
        ratios = [f(run["disk_bytes"]) / stored for run in (unswept, swept) for f in (max, lambda sizes: sizes[-1])]
        lines.append(
            f"| {name} | {' | '.join(f'{ratio:.2f} ×' for ratio in ratios)} | {unswept['write']} | {swept['write']} |"
        )
    lines += [
        "",
        f"Without other calls: {costs['freed_bytes'] / 1e6:.0f} MB were freed in {costs['seconds']:.1f} s, of which "
        f"up to a second before the sweeper looks, with {costs['processor_seconds']:.2f} s of processor time and "
        f"{costs['written_bytes'] / 1e6:.1f} MB written.",
        "",
        "| call | not sweeping | sweeping | calls |",
        "|---|---|---|---|",
    ]
    for name, both in costs["calls"].items():
        lines.append(
            f"| {name} | {both['not']} | {both['sweeping']} | {both['not'].num_calls}, {both['sweeping'].num_calls} |"
        )
    return "\n".join([*lines, "", "![File size over checkpoints](sweeping.png)"])


def draw(num_rows: int, spaces: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for number, (name, runs) in enumerate(spaces.items()):
        for kind, style in (("unswept", "--"), ("swept", "-")):
            ratio = np.array(runs[kind]["disk_bytes"]) / (num_rows * BLOCK_BYTES / 63)
            axes.plot(np.arange(len(ratio)) + 1, ratio, style, color=f"C{number}", label=f"{name}, {kind}")
    axes.set(xlabel="checkpoints taken", ylabel="file / rows", title=f"File size, {KEEP} checkpoints kept")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--checkpoints", type=at_least(2), default=200)
    parser.add_argument("--cost-rows", type=int, default=300_000, help="of the table whose sweep is timed")
    parser.add_argument("--directory", type=Path, help="for the shard's data (default a temporary one)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the data are removed
    keep_large_buffers()
    num_rows, num, where = arguments.rows, arguments.checkpoints, arguments.directory
    spaces = {
        name: {
            kind: space(cluster, pattern, num_rows, num, where)
            for kind, cluster in (("unswept", UnsweptCluster), ("swept", LocalCluster))
        }
        for name, pattern in PATTERNS.items()
    }
    costs = cost(arguments.cost_rows, where)
    command = f"python -m benchmarks.sweeping --rows {num_rows} --checkpoints {num} --cost-rows {arguments.cost_rows}"
    results = {"space": spaces, "cost": costs}
    write_results(arguments.output, "sweeping", command, results, as_table(num_rows, num, spaces, costs))
    draw(num_rows, spaces, arguments.output / "sweeping.png")


if __name__ == "__main__":
    main()
