"""Measures what metrics cost: a shard at fetches, whose handler has them or not, and a client of 64 shards at a scrape.

python -m benchmarks.measuring [--rounds 200] [--output benchmarks/results]

D = 128, one shard, 200,000 stored rows, a gap of 18,000 steps to correct. Both handlers run in this process, where the
difference shows best; it is compared with the time that a client of a real shard waits for the same rows. Each handler
runs right after a client's call and finds the processor's caches as that call left them: of two handlers in a row, the
second would appear faster. The handler without metrics has no clock of stages either. Fetches of few rows are repeated
ten times as often, because they differ by only about 20 µs.

The scrape's page has three methods of 64 shards; its time is the processor's, of one core, in scrapes 5 s apart.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np

from benchmarks.measure import Timing, at_least, in_turn, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers
from weightserver.common.metrics import Histograms, Registry, page
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


class NoMetrics(ShardMetrics):
    """Counts and times nothing."""

    def fetched(self, wanted: int, rows: int, num_bytes: int) -> None: ...
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
def handlers() -> Iterator[tuple[WeightServerService, WeightServerService]]:
    """Two handlers of the same data, the first with metrics."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        storage = stack.enter_context(closing(LmdbStorage(Path(directory))))
        metrics = ShardMetrics(shard=0, num_shards=1, version="0")
        memory = RequestMemory(1 << 50)  # which is never given back: these calls do not end
        measured = Shard(storage, shard=0, num_shards=1)
        fill(measured)
        services = []
        for shard, kept in (
            (measured, metrics),
            (Shard(storage, shard=0, num_shards=1), NoMetrics(shard=0, num_shards=1, version="0")),
        ):
            committer = Committer(shard.batch)
            stack.callback(committer.close)
            services.append(WeightServerService(shard, committer, kept, memory))
        yield services[0], services[1]


def handled(service: WeightServerService, rows: Any, clock: Any) -> Callable[[], None]:
    """A fetch by its handler, with `clock` for `StageClock.start`."""
    rates, context = np.full(STEP, 0.06, np.float32), Mock(spec=grpc.ServicerContext)
    context.invocation_metadata.return_value = ((VERSION_KEY, __version__),)
    list(service.Fetch(pb.FetchRequest(step=STEP, rates=pb.Rates(learning_rates=to_bytes(rates))), context))
    named = pb.Rates(start=STEP, digest=HashedRates(rates).digest(STEP))
    message = pb.FetchRequest(rows=rows_to_proto(rows), step=STEP, rates=named).SerializeToString()
    fetch = service.calls.handler_in_parts("Fetch", service.Fetch, pb.FetchRequest.FromString).stream_stream

    def run() -> None:
        StageClock.start = clock  # type: ignore[method-assign]
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


def measure(rounds: int) -> dict[str, dict[str, Timing]]:
    """Times of a fetch by number of rows and by who fetches."""
    start, results = StageClock.start, {}
    with handlers() as (measured, bare), filled_client() as client:
        for num_rows, num_rounds in {65_536: rounds, 512: 10 * rounds}.items():
            rows, out = np.arange(num_rows), np.empty((num_rows, SPEC.dim), np.float32)
            fetch = partial(client.fetch, rows, step=STEP, out=out)
            calls: dict[str, Callable[[], object]] = {
                "client": fetch,
                "measured": handled(measured, rows, start),
                "client again": fetch,
                "bare": handled(bare, rows, lambda *_: None),
            }
            results[f"{num_rows:,} rows"] = in_turn(calls, rounds=num_rounds)
    return results


def scrape(rounds: int) -> dict[str, float]:
    """Processor time and size of a page with the calls of 64 shards."""
    registry = Registry()
    family = Histograms("calls_seconds", "Calls.", ("shard", "method", "size_class", "outcome"), registry)
    for shard, method in product(range(64), ("Fetch", "PushGradients", "WriteState")):
        family.labels(str(shard), method, "2048", "ok").observe(0.01)
    started = time.process_time()
    for _ in range(rounds):
        text = page(registry)
    seconds = (time.process_time() - started) / rounds
    return {"seconds": seconds, "share": seconds / 5, "bytes": len(text), "samples": text.count(b"\n") - 2}


def as_table(results: dict[str, dict[str, Timing]], ratios: dict[str, float], scraped: dict[str, float]) -> str:
    lines = [f"Goal: less than {GOAL - 1:.0%} of the time that a client waits.", ""]
    lines += ["| fetch | measured | not measured | by a client | cost |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {name} | {t['measured']} | {t['bare']} | {t['client']} | {ratios[name] - 1:.1%} |"
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
    ratios = {
        name: 1 + (times["measured"].p50 - times["bare"].p50) / times["client"].p50 for name, times in results.items()
    }
    command = f"python -m benchmarks.measuring --rounds {arguments.rounds}"
    scraped = scrape(arguments.rounds)
    table = as_table(results, ratios, scraped)
    write_results(arguments.output, "measuring", command, {**results, "ratios": ratios, "scrape": scraped}, table)


if __name__ == "__main__":
    main()
