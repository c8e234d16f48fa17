"""Fetches by 1, 2 and 4 clients at once, from 1, 2 and 4 shards, beside bare streams of the same bytes.

python -m benchmarks.readers [--rounds 20] [--output benchmarks/results]

Each client is a process of its own, as is each shard. In a round all clients fetch 65,536 neighbouring rows each
(D = 128, 32 MiB), corrected over 300 different gaps of at most 400 steps; then the same number of clients takes as many
bytes from as many bare servers. A round ends with its last client.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np

from benchmarks.bare import CHANNEL_OPTIONS, serving, wanted
from benchmarks.measure import Timing, at_least, in_turn, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers

COUNTS = (1, 2, 4)
"""Of shards, and of clients."""
NUM_ROWS, DIM = 65_536, 128
NUM_BYTES = 4 * DIM * NUM_ROWS
_FIRST_STEP = 300
_RATES = np.linspace(0.06, 0, 20_000, dtype=np.float32)
_WRITTEN_AT_ONCE = 1 << 15
_DEADLINE_SECONDS = 60


def fill(client: WeightClient) -> None:
    """Stores the rows of all clients, whose last updates spread over 300 steps."""
    num_rows = NUM_ROWS * max(COUNTS)
    client.create_table(TableSpec(num_rows=num_rows, dim=DIM))
    client.extend_schedule(0, _RATES)
    client.open_session("benchmark")
    generator = np.random.default_rng(1)
    for start in range(0, num_rows, _WRITTEN_AT_ONCE):
        rows = np.arange(start, start + _WRITTEN_AT_ONCE, dtype=np.int64)
        values = generator.standard_normal((2, len(rows), DIM), dtype=np.float32)
        client.write_state(rows, values[0], values[1], rows // 512 % 300)


def read(kind: str, addresses: list[str], number: int) -> None:
    """A client: fetches once for each line of stdin, and answers each with a line."""
    keep_large_buffers()
    with ExitStack() as stack:
        fetch = _fetch(stack, addresses, number) if kind == "ours" else _take_streams(stack, addresses)
        fetch()
        print("ready", flush=True)
        for _ in sys.stdin:
            fetch()
            print("fetched", flush=True)


def _fetch(stack: ExitStack, addresses: list[str], number: int) -> Callable[[], object]:
    client = stack.enter_context(WeightClient(addresses))
    client.extend_schedule(0, _RATES)
    rows = np.arange(number * NUM_ROWS, (number + 1) * NUM_ROWS, dtype=np.int64)
    out, steps = np.empty((NUM_ROWS, DIM), np.float32), itertools.count(_FIRST_STEP)
    return lambda: client.fetch(rows, step=next(steps), out=out)  # a new step, as in training: new products


def _take_streams(stack: ExitStack, addresses: list[str]) -> Callable[[], object]:
    """Takes a part of the bytes from each server, all at the same time."""
    channels = [stack.enter_context(grpc.insecure_channel(each, CHANNEL_OPTIONS)) for each in addresses]
    pool = stack.enter_context(ThreadPoolExecutor(len(channels)))
    request = wanted(NUM_BYTES // len(channels))

    def take(channel: grpc.Channel) -> int:
        return sum(map(len, channel.unary_stream("/Bare/SendStream")(request, timeout=_DEADLINE_SECONDS)))

    def take_all() -> None:
        if sum(pool.map(take, channels)) != NUM_BYTES:
            raise SystemExit("readers: a stream was cut short")

    return take_all


@contextmanager
def readers(kind: str, addresses: list[str], count: int) -> Iterator[Callable[[], None]]:
    """So many clients; the call has each of them fetch once, and returns when all have."""
    with ExitStack() as stack:
        command = [sys.executable, "-m", "benchmarks.readers", "--read", kind, "--addresses", ",".join(addresses)]
        clients = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "--number", str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for number in range(count)
        ]

        def answers(expected: str) -> None:
            for client in clients:
                assert client.stdout is not None
                if client.stdout.readline().strip() != expected:
                    raise SystemExit("readers: a client ended")

        def fetch_all() -> None:
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("\n")
                client.stdin.flush()
            answers("fetched")

        answers("ready")
        yield fetch_all  # leaving the processes closes their stdin


def measure(rounds: int) -> dict[str, dict[str, Timing]]:
    """The seconds of a round, by "shards, clients"."""
    results: dict[str, dict[str, Timing]] = {}
    for num_shards in COUNTS:
        with ExitStack() as stack:
            cluster = stack.enter_context(LocalCluster(num_shards))
            fill(stack.enter_context(WeightClient(cluster.addresses)))
            bare = [stack.enter_context(serving("benchmarks.bare")) for _ in range(num_shards)]
            for num_clients in COUNTS:
                with ExitStack() as started:
                    calls: dict[str, Callable[[], object]] = {
                        "ours": started.enter_context(readers("ours", cluster.addresses, num_clients)),
                        "bare": started.enter_context(readers("bare", bare, num_clients)),
                    }
                    results[f"{num_shards}, {num_clients}"] = in_turn(calls, rounds=rounds)
    return results


def as_table(results: dict[str, dict[str, Timing]]) -> str:
    """A line for each number of shards and clients."""
    lines = ["| shards, clients | ours, ms | bare streams, ms | ratio | ours, GiB/s |", "|---|---|---|---|---|"]
    for name, timings in results.items():
        ours, bare = timings["ours"], timings["bare"]
        num_clients = int(name.split(", ")[1])
        rate = num_clients * NUM_BYTES / ours.p50 / 2**30
        times = " | ".join(str(each).removesuffix(" ms") for each in (ours, bare))
        lines.append(f"| {name} | {times} | {ours.p50 / bare.p50:.2f} | {rate:.2f} |")
    return "\n".join(["Median of the rounds with the 10th and 90th percentile.", "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=20)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--read", choices=("ours", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.read, options.addresses.split(","), options.number)
        return
    results = measure(options.rounds)
    command = f"python -m benchmarks.readers --rounds {options.rounds}"
    write_results(options.output, "readers", command, results, as_table(results))


if __name__ == "__main__":
    main()
