"""Compares fetches, pushes and state writes of several checkouts of this project, in turn in one run.

python -m benchmarks.trees . ../before [--rounds 14] [--shards 1] [--only "fetch 512"]

Each checkout has a process of its own, with its client and its shards, which makes one call at a time; the order
changes from round to round. A line shows, for each checkout, the median of the calls, the median ratio to the first
checkout's in the same round with its quartiles, and the processor time of a call, of its shards and of its client. A
checkout without a compiled kernel is measured without it.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers

DIM, NUM_STORED = 128, 1 << 19
NEVER_WRITTEN, MANY_GAPS, WRITTEN, STEPPED = 500_000_000, 1 << 21, 1 << 22, 1 << 23
"""First rows of ranges: never written; with 9,000 distinct gaps; of state writes; of steps."""
WARM_UP = 2
SMALL_CALLS = 20
"""Calls in a round, of small fetches; of others one."""
Calls = dict[str, Callable[[], object]]


def calls_of(client: WeightClient) -> Calls:
    """What is timed, by name, on a table that this fills."""
    generator = np.random.default_rng(1)
    client.create_table(TableSpec(num_rows=10**9, dim=DIM))
    client.extend_schedule(0, np.linspace(0.06, 0, 100_000, dtype=np.float32))
    holds = "hold" in inspect.signature(client.open_session).parameters  # its renewals would be calls beside these
    client.open_session("benchmark", **({"hold": False} if holds else {}))
    for first, num_rows, gaps in ((0, NUM_STORED, 300), (MANY_GAPS, 1 << 17, 9_000)):
        for start in range(first, first + num_rows, 1 << 15):
            rows = np.arange(start, start + (1 << 15))
            weight, momentum_buffer = generator.standard_normal((2, len(rows), DIM), dtype=np.float32)
            last_step = rows // 512 % gaps if gaps == 300 else generator.integers(0, gaps, len(rows))
            client.write_state(rows, weight, momentum_buffer, last_step)
    steps = {"fetch": itertools.count(18_000), "push": itertools.count(400), "write": itertools.count(20_000)}
    step_of_training = itertools.count(30_000)
    calls: Calls = {}

    def fetch(rows: np.ndarray) -> None:
        client.fetch(rows, step=next(steps["fetch"]))

    def push(rows: np.ndarray, gradients: np.ndarray) -> None:
        client.push_gradients(rows, gradients, step=next(steps["push"]))

    def write(rows: np.ndarray, values: np.ndarray) -> None:
        client.write_state(rows, values, values, next(steps["write"]))

    def remote_step(rows: np.ndarray, gradients: np.ndarray) -> None:
        step = next(step_of_training)
        client.fetch(rows, step=step)
        client.push_gradients(rows, gradients, step=step)

    def call(name: str, function: Callable[..., object], *arguments: np.ndarray) -> None:
        calls[name] = lambda: function(*arguments)

    for num_rows in (65_536, 512):
        for name, rows in patterns(num_rows).items():
            call(f"fetch {num_rows}, {name}", fetch, rows)
        call(f"fetch {num_rows}, never written", fetch, np.arange(num_rows) + NEVER_WRITTEN)
        call(f"fetch {num_rows}, 9,000 gaps", fetch, np.arange(num_rows) + MANY_GAPS)
    for num_rows in (4_096, 65_536):
        values = generator.standard_normal((num_rows, DIM), dtype=np.float32)
        for name, rows in patterns(num_rows).items():
            if num_rows == 4_096 or name != "scattered":
                call(f"push {num_rows}, {name}", push, rows, values)
            if num_rows == 65_536 and name != "scattered":
                call(f"write {num_rows}, {name}", write, rows + WRITTEN, values)
    call("remote step of 65536, half of a window", remote_step, patterns(65_536)["half of a window"] + STEPPED, values)
    return calls


def patterns(num_rows: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "contiguous": np.arange(num_rows) + 1_000,
        "half of a window": np.sort(generator.choice(2 * num_rows, num_rows, replace=False)) + 1_000,
        "scattered": np.sort(generator.choice(NUM_STORED, num_rows, replace=False)),
    }


def work(num_shards: int) -> None:
    """A checkout's process: makes the calls that stdin names, and prints their seconds and processor seconds."""
    keep_large_buffers()
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(num_shards, directory) as cluster,
        WeightClient(cluster.addresses) as client,
    ):
        calls, own = calls_of(client), psutil.Process()
        shards = [psutil.Process(process.pid) for process in cluster.processes]

        def processor_seconds() -> list[float]:
            return [sum(sum(process.cpu_times()[:2]) for process in each) for each in (shards, [own])]

        print(json.dumps(list(calls)), flush=True)
        for line in sys.stdin:
            name, count = json.loads(line)
            before, seconds = processor_seconds(), []
            for _ in range(count):
                started = time.perf_counter()
                calls[name]()
                seconds.append(time.perf_counter() - started)
            used = [(after - first) / count for first, after in zip(before, processor_seconds(), strict=True)]
            print(json.dumps([statistics.median(seconds), *used]), flush=True)


class Checkout:
    """A checkout's process."""

    def __init__(self, root: Path, num_shards: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).resolve(), "--work", str(num_shards)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin
        assert self.process.stdout
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self.names: list[str] = json.loads(self._answers.readline())

    def measure(self, name: str, count: int) -> list[float]:
        """Seconds of a call, processor seconds of the shards and of the client."""
        print(json.dumps([name, count]), file=self._requests, flush=True)
        answer: list[float] = json.loads(self._answers.readline())
        return answer

    def close(self) -> None:
        self._requests.close()
        self.process.wait()


def compare(checkouts: list[Checkout], name: str, rounds: int) -> str:
    """One line of figures."""
    count = SMALL_CALLS if "fetch 512" in name else 1
    measured: list[list[list[float]]] = [[] for _ in checkouts]
    for round_number in range(WARM_UP + rounds):
        order = range(len(checkouts)) if round_number % 2 else reversed(range(len(checkouts)))
        for place in order:
            values = checkouts[place].measure(name, count)
            if round_number >= WARM_UP:
                measured[place].append(values)
    parts = []
    for rows in measured:
        ratios = [mine[0] / first[0] for mine, first in zip(rows, measured[0], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        seconds = statistics.median(row[0] for row in rows)
        shards, client = (statistics.mean(row[column] for row in rows) for column in (1, 2))
        parts.append(
            f"{1e3 * seconds:7.2f} ms × {middle:.2f} ({low:.2f}–{high:.2f}), {1e3 * shards:.1f} + {1e3 * client:.1f} ms"
        )
    return f"{name:40}" + "   ".join(parts)


def main() -> None:
    from benchmarks.measure import at_least  # late: a checkout's process has that checkout's benchmarks, if any

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="the first is what the others are compared with")
    parser.add_argument("--rounds", type=at_least(2), default=14)
    parser.add_argument("--shards", type=at_least(1), default=1)
    parser.add_argument("--only", default="", help="measure the calls whose names contain this")
    arguments = parser.parse_args()
    if not arguments.checkouts:
        parser.error("give at least one checkout")
    for root in arguments.checkouts:
        if not (root / "weightserver/__init__.py").is_file():
            parser.error(f"{root} is no checkout of this project: it has no weightserver/__init__.py")
    checkouts = [Checkout(root, arguments.shards) for root in arguments.checkouts]
    try:
        for name in checkouts[0].names:
            if arguments.only in name:
                print(compare(checkouts, name, arguments.rounds), flush=True)
    finally:
        for checkout in checkouts:
            checkout.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]))
    else:
        main()
