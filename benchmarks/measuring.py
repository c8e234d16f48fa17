"""What it costs a shard to measure a fetch: its handler with metrics beside the same one that keeps none.

python -m benchmarks.measuring [--rounds 200] [--output benchmarks/results]

D = 128, one shard, 200,000 stored rows, a gap of 18,000 steps to correct. Both handlers run in this process, where the
difference is seen best; it is set against the time that a client of a real shard waits for the same rows. Each handler
runs right behind a client's call, and finds the processor's caches as that left them: of two that ran one behind the
other, the second would seem the faster. The handler without metrics has no clock of stages either. Few rows are fetched
ten times as often, because their difference is some 20 µs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np

from benchmarks.measure import draw_bars, in_turn, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers
from weightserver.common.stages import StageClock
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import rows_to_proto
from weightserver.server.admission import Memory
from weightserver.server.metrics import ShardMetrics
from weightserver.server.service import WeightServerService
from weightserver.shard.group_commit import Committer
from weightserver.shard.schedule_change import Part
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=200_000, dim=128)
STEP = 18_000
GOAL = 1.02


class NoMetrics(ShardMetrics):
    """Counts nothing."""

    def fetched(self, rows: int, num_bytes: int) -> None: ...
    def requested(self, operation: str, num_rows: int) -> None: ...
    def fetch_stages(self, seconds: dict[str, float]) -> None: ...
    def answered(self, method: str, status: str, seconds: float) -> None: ...


def fill(shard: Shard) -> None:
    with shard.batch() as batch:
        shard.create_table(batch, SPEC)
    with shard.batch() as batch:
        shard.prepare_schedule(batch, Part("00" * 16, 0, np.full(STEP, 0.06, np.float32)), version=0)
        shard.commit_schedule(batch, "00" * 16, digest=batch.schedule.pending.digest)
    with shard.batch() as batch:
        shard.open_session(batch, "benchmark", 1, bytes(16))
    values = np.random.default_rng(0).standard_normal((SPEC.num_rows, SPEC.dim), dtype=np.float32)
    header = WriteHeader(epoch=1, opener=bytes(16), writer=bytes(16), sequence=1, settled_before=0, step=0)
    with shard.batch() as batch:
        rows = np.arange(SPEC.num_rows)
        shard.write_state(batch, header, rows, values, values, np.zeros(len(rows), np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    keep_large_buffers()
    context, enter = Mock(spec=grpc.ServicerContext), StageClock.enter
    metrics = ShardMetrics(shard=0, num_shards=1, version="0")
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        storage = LmdbStorage(Path(directory))
        shards = [Shard(storage, shard=0, num_shards=1, on_gaps=metrics.correction_gaps)]
        fill(shards[0])
        shards.append(Shard(storage, shard=0, num_shards=1))
        committers = [Committer(shard.batch) for shard in shards]
        silent = NoMetrics(shard=0, num_shards=1, version="0")
        measured, bare = (
            WeightServerService(shard, committer, kept, Memory(1 << 32))
            for shard, committer, kept in zip(shards, committers, (metrics, silent), strict=True)
        )

        def call(service: WeightServerService, rows: Any, clock: Any) -> Callable[[], None]:
            request = pb.FetchRequest(rows=rows_to_proto(rows), step=STEP)

            def run() -> None:
                StageClock.enter = clock  # type: ignore[method-assign]
                for _ in service.Fetch(request, context):
                    pass

            return run

        results = {}
        cluster = stack.enter_context(LocalCluster(1))
        client = stack.enter_context(WeightClient(cluster.addresses))
        client.create_table(SPEC)
        client.extend_schedule(0, np.full(STEP, 0.06, np.float32))
        client.open_session("benchmark")
        for part in np.array_split(np.arange(SPEC.num_rows), 8):
            client.write_state(
                part, np.ones((len(part), SPEC.dim), np.float32), np.ones((len(part), SPEC.dim), np.float32), 0
            )
        for num_rows, rounds in {65_536: arguments.rounds, 512: 10 * arguments.rounds}.items():
            rows, out = np.arange(num_rows), np.empty((num_rows, SPEC.dim), np.float32)
            fetch = partial(client.fetch, rows, step=STEP, out=out)
            calls = {
                "client": fetch,
                "measured": call(measured, rows, enter),
                "client again": fetch,
                "bare": call(bare, rows, lambda *_: None),
            }
            results[f"{num_rows:,} rows"] = in_turn(calls, rounds=rounds)
        for committer in committers:
            committer.close()
        storage.close()
    ratios = {
        name: 1 + (times["measured"].p50 - times["bare"].p50) / times["client"].p50 for name, times in results.items()
    }
    lines = [f"Goal: less than {GOAL - 1:.0%} of what a client waits.", ""]
    lines += ["| fetch | measured | not measured | by a client | cost |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {name} | {t['measured']} | {t['bare']} | {t['client']} | {ratios[name] - 1:.1%} |"
        for name, t in results.items()
    ]
    lines += ["", "![Measured fetches beside others](measuring.png)"]
    command = f"python -m benchmarks.measuring --rounds {arguments.rounds}"
    write_results(arguments.output, "measuring", command, {**results, "ratios": ratios}, "\n".join(lines))
    draw_bars(arguments.output / "measuring.png", ratios, "time of a client's fetch / without measuring")


if __name__ == "__main__":
    main()
