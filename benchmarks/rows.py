"""Compares fetches from and pushes to one shard with a bare gRPC server that moves the same bytes.

python -m benchmarks.rows [--rounds 30] [--output benchmarks/results]

Three patterns of rows, D = 128: contiguous (a window's shift), a random half of a window (what the K most recent rows
of a window are), and scattered over a table of a million stored rows. Fetches of stored and of never-written rows, each
for a step that was not asked for before, as in training; of neighbours also with 9,000 distinct gaps, as in epoch
order; and durable pushes. The peer is the fastest bare stream or call of the same bytes, with the same allocator
settings, in the same process tree, timed in turn; a push has a second floor, LMDB committing the same blocks with no
network.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import lmdb
import numpy as np

from benchmarks.bare import bare_server
from benchmarks.measure import at_least, in_turn, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.blocks import BlockCodec
from weightserver.core.correction import Schedule
from weightserver.protocol.codec import CHUNK_BYTES

DIM = 128
NUM_STORED = 1 << 20
NEVER_WRITTEN = 500_000_000
"""The first of the rows that are never written."""
SPEC = TableSpec(num_rows=10**9, dim=DIM)
NUM_STEPS = 100_000
GAP = 18_000
"""Steps between a stored row's last update and the step it is fetched for, as over an epoch of ImageNet-11K."""
MANY_GAPS = 9_000
FIRST_OF_MANY_GAPS = 1 << 21
"""The first of 2^17 stored rows whose last updates are any of the first 9,000 steps."""
FLOOR = "bare stream"
SMALL = 512
"""Rows of a small fetch, of which ten times as many are timed: its slow calls count as well."""
Calls = dict[str, Callable[[], object]]
"""What is timed, by name; `FLOOR` is the peer."""


def patterns(num_rows: int) -> dict[str, Int64Array]:
    generator = np.random.default_rng(0)
    return {
        "contiguous": np.arange(num_rows, dtype=np.int64) + 1_000,
        "half of a window": np.sort(generator.choice(2 * num_rows, num_rows, replace=False)) + 1_000,
        "scattered": np.sort(generator.choice(NUM_STORED, num_rows, replace=False)),
    }


def fill(client: WeightClient) -> None:
    """Stores NUM_STORED rows whose last updates spread over the first 300 steps, and 2^17 rows over 9,000 steps."""
    generator = np.random.default_rng(1)

    def write(first: int, num_rows: int, last_step: Callable[[Int64Array], Int64Array]) -> None:
        for start in range(first, first + num_rows, 1 << 15):
            rows = np.arange(start, start + (1 << 15), dtype=np.int64)
            values = generator.standard_normal((2, len(rows), DIM), dtype=np.float32)
            client.write_state(rows, values[0], values[1], last_step(rows))

    write(0, NUM_STORED, lambda rows: rows // 512 % 300)
    write(FIRST_OF_MANY_GAPS, 1 << 17, lambda rows: generator.integers(0, MANY_GAPS, len(rows)))


def fetches(client: WeightClient, channel: grpc.Channel) -> Iterator[tuple[str, Calls]]:
    """The cases of fetches: a name, and the calls to compare."""
    send_stream, send_call = channel.unary_stream("/Bare/SendStream"), channel.unary_unary("/Bare/SendCall")
    steps = itertools.count(GAP)

    def fetch(rows: Int64Array, out: Float32Array) -> None:
        client.fetch(rows, step=next(steps), out=out)

    for num_rows in (65_536, SMALL):
        request = str(num_rows * DIM * 4).encode()
        out = np.empty((num_rows, DIM), np.float32)
        for name, rows in patterns(num_rows).items():
            calls: Calls = {
                FLOOR: partial(_drain, send_stream, request),
                "stored": partial(fetch, rows, out),
                "never written": partial(fetch, rows + NEVER_WRITTEN, out),
            }
            if name == "contiguous":
                calls["stored, 9,000 distinct gaps"] = partial(fetch, rows + FIRST_OF_MANY_GAPS, out)
            if num_rows == SMALL:
                calls["bare call"] = partial(send_call, request)
            yield f"fetch of {num_rows:,} rows, {name}", calls


def _drain(stream: Callable[[bytes], Iterable[bytes]], request: bytes) -> int:
    return sum(len(message) for message in stream(request))


def pushes(client: WeightClient, channel: grpc.Channel, directory: Path) -> Iterator[tuple[str, Calls]]:
    """The cases of pushes. Each case's calls are valid until the next one is asked for."""
    take_stream = channel.stream_unary("/Bare/TakeStream")
    num_rows, step = 4_096, 400
    gradients = np.random.default_rng(2).standard_normal((num_rows, DIM), dtype=np.float32)
    data = gradients.tobytes()
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    block = bytearray(BlockCodec(SPEC).num_bytes)
    for name, rows in patterns(num_rows).items():
        num_blocks = len(np.unique(rows // SPEC.rows_per_block))
        with lmdb.open(str(directory / name), map_size=1 << 36, lib_version=0) as environment:

            def commit(environment: lmdb.Environment = environment, num_blocks: int = num_blocks) -> None:
                with environment.begin(write=True) as txn:
                    for number in range(num_blocks):
                        txn.put(number.to_bytes(8, "big"), block)

            def push(rows: Int64Array = rows) -> None:
                nonlocal step
                client.push_gradients(rows, gradients, step=step)
                step += 1

            calls: Calls = {
                FLOOR: lambda: take_stream(iter(chunks)),
                f"LMDB commit of {num_blocks:,} blocks": commit,
                "push": push,
            }
            yield f"push to {num_rows:,} rows, {name}", calls


@contextmanager
def cases() -> Iterator[Iterator[tuple[str, Calls]]]:
    """All cases of fetches and pushes, over a shard with stored rows and a bare server."""
    keep_large_buffers()
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(1) as cluster,
        WeightClient(cluster.addresses) as client,
        bare_server() as channel,
    ):
        client.create_table(SPEC)
        client.extend_schedule(0, np.linspace(0.06, 0, NUM_STEPS, dtype=np.float32))
        client.open_session("benchmark")
        fill(client)
        yield itertools.chain(fetches(client, channel), pushes(client, channel, Path(directory)))


def tables() -> dict[str, Any]:
    """Times creating a table of 10^9 rows on a fresh shard, and building the schedule's tables for 1.4 M steps."""
    seconds = []
    for _ in range(5):
        with LocalCluster(1) as cluster, WeightClient(cluster.addresses) as client:
            client.drop_table()  # connects, which is not part of creating a table
            started = time.perf_counter()
            client.create_table(SPEC)
            seconds.append(time.perf_counter() - started)
            disk_bytes = client.describe().disk_bytes
    started = time.perf_counter()
    schedule = Schedule(
        momentum=0.9, weight_decay=1e-4, learning_rates=np.linspace(0.06, 0, 1_400_000, dtype=np.float32)
    )
    return {
        "create_table_seconds": max(seconds),
        "create_table_disk_bytes": disk_bytes,
        "schedule_table_bytes": schedule.table_bytes,
        "schedule_build_seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=30)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    with cases() as all_cases:
        results: dict[str, Any] = {}
        for name, calls in all_cases:
            is_small = name.startswith(f"fetch of {SMALL} ")
            results[name] = in_turn(calls, rounds=10 * arguments.rounds if is_small else arguments.rounds)
    results["tables"] = tables()
    write_results(
        arguments.output, "rows", f"python -m benchmarks.rows --rounds {arguments.rounds}", results, as_table(results)
    )


def as_table(results: dict[str, Any]) -> str:
    lines = [
        "Median of the calls with the 10th and 90th percentile; the ratio is that of the medians.",
        "",
        "| case | what | time | 99th percentile | ratio to the bare stream |",
        "|---|---|---|---|---|",
    ]
    for case, timings in results.items():
        if case != "tables":
            for what, value in timings.items():
                slow = "" if value.p99 is None else f"{1e3 * value.p99:.2f} ms"
                lines.append(f"| {case} | {what} | {value} | {slow} | {value.p50 / timings[FLOOR].p50:.2f} |")
    table = results["tables"]
    lines += [
        "",
        f"create_table for 10⁹ rows: {1e3 * table['create_table_seconds']:.1f} ms (the slowest of 5), "
        f"{table['create_table_disk_bytes'] / 1024:.0f} KiB on disk. Schedule tables for 1.4 M steps: "
        f"{table['schedule_table_bytes'] / 2**20:.1f} MiB, built in {table['schedule_build_seconds']:.2f} s.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
