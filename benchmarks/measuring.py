"""Measures what metrics cost: a shard at fetches, whose handler has them or not, and a client of 64 shards at a scrape.

python -m benchmarks.measuring [--rounds 200] [--output benchmarks/results]

D = 128, one shard, 200,000 stored rows, a gap of 18,000 steps to correct. One handler in this process answers in turn
with metrics and the clock of stages, and without them. Each answer follows a client's call, and finds the processor's
caches as that left them. The cost is the median difference of two answers in a row, in processor time of the handler's
thread; it is compared with the time that a client of a real shard waits for the same rows. How many calls of functions
measuring makes does not depend on the machine. Fetches of few rows are repeated ten times as often: they differ by some
20 µs.

The scrape's page is that of a trainer's client: the methods that a trainer calls, of 64 shards. Its time is the
processor's, of one core, in scrapes 5 s apart.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np

from benchmarks.measure import at_least, timing, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.client.calls import WATCH, Call
from weightserver.client.metrics import registry
from weightserver.common.malloc import keep_large_buffers
from weightserver.common.metrics import page
from weightserver.common.stages import StageClock
from weightserver.common.version import __version__
from weightserver.core.rates import HashedRates
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import VERSION_KEY, rows_to_proto, to_bytes
from weightserver.server.metrics import ShardMetrics
from weightserver.server.request_memory import RequestMemory
from weightserver.server.service import WeightServerService
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=200_000, dim=128)
STEP = 18_000
GOAL = 1.02
METHODS = dict.fromkeys(("Checkpoint", "CreateTable", "Describe", "OpenSession", "Release"), 0)
METHODS |= {"Fetch": 100, "WriteState": 2000}
"""What a trainer calls, with numbers of rows."""


class NoMetrics(ShardMetrics):
    """Counts and times nothing."""

    def count(self, operation: str, wanted: int, rows: int, num_bytes: int) -> None: ...
    def fetch_stages(self, seconds: dict[str, float]) -> None: ...
    def answered(self, method: str, status: Any, size_class: str, seconds: float) -> None: ...


def fill(shard: Shard) -> None:
    with shard.batch() as batch:
        batch.create_table(SPEC)
    with shard.batch() as batch:
        batch.open_session("benchmark", 1, bytes(16))
    values = np.random.default_rng(0).standard_normal((SPEC.num_rows, SPEC.dim), dtype=np.float32)
    header = WriteHeader(epoch=1, session_id=bytes(16), writer=bytes(16), sequence=1, step=0)
    with shard.batch() as batch:
        rows = np.arange(SPEC.num_rows)
        batch.write_state(header, rows, values, values, np.zeros(len(rows), np.int64))


@contextmanager
def filled_service() -> Iterator[WeightServerService]:
    """A service of a shard that stores all rows."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        storage = stack.enter_context(closing(LmdbStorage(Path(directory))))
        memory = RequestMemory(1 << 50)  # which is never given back: these calls do not end
        shard = Shard(storage, shard=0, num_shards=1)
        fill(shard)
        committer = Committer(shard.batch)
        stack.callback(committer.close)
        yield WeightServerService(shard, committer, ShardMetrics(shard=0, num_shards=1, version="0"), memory)


def handled(service: WeightServerService, rows: Any, metrics: ShardMetrics, clock: Any) -> Callable[[], None]:
    """A fetch by its handler, with these metrics, and `clock` for `StageClock.start`."""
    rates, context = np.full(STEP, 0.06, np.float32), Mock(spec=grpc.ServicerContext)
    context.invocation_metadata.return_value = ((VERSION_KEY, __version__),)
    list(service.Fetch(pb.FetchRequest(step=STEP, rates=pb.Rates(learning_rates=to_bytes(rates))), context))
    named = pb.Rates(start=STEP, digest=HashedRates(rates).digest(STEP))
    message = pb.FetchRequest(rows=rows_to_proto(rows), step=STEP, rates=named).SerializeToString()
    fetch = service.calls.handler_in_parts("Fetch", service.Fetch, pb.FetchRequest.FromString).stream_stream

    def run() -> None:
        StageClock.start = clock  # type: ignore[method-assign]
        service._metrics = service.calls._metrics = metrics
        for _ in fetch(iter([message]), context):
            pass

    return run


@contextmanager
def filled_client() -> Iterator[WeightClient]:
    """A client of a real shard that stores all rows."""
    with LocalCluster(1) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, np.full(STEP, 0.06, np.float32))
        client.open_session("benchmark")
        for part in np.array_split(np.arange(SPEC.num_rows), 8):
            ones = np.ones((len(part), SPEC.dim), np.float32)
            client.write_state(part, ones, ones, 0)
        yield client


def num_calls(call: Callable[[], object]) -> int:
    """How many functions it calls, of Python and C."""
    events = list[str]()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def measure(rounds: int) -> dict[str, dict[str, Any]]:
    """By number of rows: times of a fetch by who fetches, and the cost of measuring, with the calls that it makes."""
    start, results = StageClock.start, dict[str, dict[str, Any]]()
    with filled_service() as service, filled_client() as client:
        metrics, none = service._metrics, NoMetrics(shard=0, num_shards=1, version="0")
        for num_rows, num_rounds in {65_536: rounds, 512: 10 * rounds}.items():
            rows, out = np.arange(num_rows), np.empty((num_rows, SPEC.dim), np.float32)
            answers = {
                "measured": handled(service, rows, metrics, start),
                "bare": handled(service, rows, none, lambda *_: "end"),
            }
            seconds: dict[str, list[float]] = {"client": [], "measured": [], "bare": []}
            for _ in range(num_rounds):
                for name, answer in answers.items():
                    started = time.perf_counter()
                    client.fetch(rows, step=STEP, out=out)
                    seconds["client"].append(time.perf_counter() - started)
                    started = time.thread_time()
                    answer()
                    seconds[name].append(time.thread_time() - started)
            times = {name: timing(values) for name, values in seconds.items()}
            cost = statistics.median(map(operator.sub, seconds["measured"], seconds["bare"])) / times["client"].p50
            more = num_calls(answers["measured"]) - num_calls(answers["bare"])
            results[f"{num_rows:,} rows"] = {**times, "cost": cost, "calls": more}
    StageClock.start = start  # type: ignore[method-assign]
    return results


def scrape(rounds: int) -> dict[str, float]:
    """Processor time, calls of functions and size of the page of a trainer's client that knows 64 shards: counters,
    gauges and histograms. It fills this process's own metrics."""
    for shard, (method, num_rows) in product(range(64), METHODS.items()):
        call = Call(str(shard), f"shard {shard}", f"{shard}/64", method, num_rows)
        WATCH.began(call)
        call.attempted()
        WATCH.waiting.pop(call)
        WATCH.ended(call)
    page(registry)  # the first one makes the names and labels of all samples
    calls = num_calls(lambda: page(registry))
    started = time.process_time()
    for _ in range(rounds):
        text = page(registry)
    seconds = (time.process_time() - started) / rounds
    samples = sum(not line.startswith(b"#") for line in text.splitlines())
    return {"seconds": seconds, "share": seconds / 5, "bytes": len(text), "samples": samples, "calls": calls}


def as_table(results: dict[str, dict[str, Any]], scraped: dict[str, float]) -> str:
    lines = [f"Goal: less than {GOAL - 1:.0%} of the time that a client waits.", ""]
    lines += ["| fetch | processor time, measured | not measured | a client waits | cost | calls of functions |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {name} | {t['measured']} | {t['bare']} | {t['client']} | {t['cost']:.1%} | +{t['calls']} |"
        for name, t in results.items()
    ]
    lines += [
        "",
        f"A scrape of a client of 64 shards: {scraped['samples']:,.0f} samples, {scraped['bytes'] / 1e6:.1f} MB, "
        f"{1000 * scraped['seconds']:.1f} ms; every 5 s, {scraped['share']:.2%} of a core (goal: at most 0.5 %).",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=200)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    keep_large_buffers()
    results = measure(arguments.rounds)
    ratios = {name: 1 + found["cost"] for name, found in results.items()}
    command = f"python -m benchmarks.measuring --rounds {arguments.rounds}"
    scraped = scrape(arguments.rounds)
    table = as_table(results, scraped)
    write_results(arguments.output, "measuring", command, {**results, "ratios": ratios, "scrape": scraped}, table)


if __name__ == "__main__":
    main()
