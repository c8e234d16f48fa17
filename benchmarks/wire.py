"""Counts the bytes that a step moves between trainer and servers, and the servers' processor time, by row store.

python -m benchmarks.wire [--steps 512] [--output benchmarks/results]

The paper's settings (B 512, K 65,536, W 131,072, S 16,384, D 128), N = 1,281,167 as in ImageNet-1K, two shards on this
machine and no other use of its loopback interface. Gradients are random: the bytes do not depend on them. The
resident store is measured over whole windows from the third on, when as many rows leave as enter.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmarks.measure import at_least, timing, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers
from weightserver.torch import VisitSchedule
from weightserver.torch.rates import LearningRates
from weightserver.torch.recency import ActiveRows, visited_before
from weightserver.torch.rows import RemoteRows, ResidentRows, RowStore

BATCH_SIZE, NUM_ACTIVE, WINDOW_SIZE, WINDOW_STRIDE = 512, 65_536, 131_072, 16_384
SPEC = TableSpec(num_rows=1_281_167, dim=128)
BFLOAT16 = replace(SPEC, dtype="bfloat16", rows_per_block=125)
STEPS_PER_WINDOW = WINDOW_SIZE // BATCH_SIZE
PREFETCH_STEPS = 8


def loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def processor_seconds(cluster: LocalCluster) -> float:
    """What the shards' processes have used."""
    used = [psutil.Process(process.pid).cpu_times() for process in cluster.processes]
    return sum(each.user + each.system for each in used)


def active_rows(schedule: VisitSchedule, steps: int) -> Iterator[ActiveRows]:
    """The active rows of each step, as a head finds them."""
    visited = visited_before(schedule.visits, 0, num_active=NUM_ACTIVE)
    for step in range(steps):
        batch = schedule.visits(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        visited = visited.followed_by(batch, num_active=NUM_ACTIVE)
        yield ActiveRows.of(visited.held(), batch)


def announced(active: Iterator[ActiveRows], store: RowStore) -> Iterator[ActiveRows]:
    """The active rows of each step, announced to the store `store.prefetch_steps` steps earlier."""
    upcoming: deque[ActiveRows] = deque()
    for step in itertools.count():
        for ahead in range(step + len(upcoming), step + 1 + store.prefetch_steps):
            if following := next(active, None):
                store.prefetch(following.rows, step=ahead)
                upcoming.append(following)
        if not upcoming:
            return
        yield upcoming.popleft()


def measure(
    make_store: Callable[[WeightClient, np.ndarray], RowStore], *, warm_up: int, steps: int, spec: TableSpec = SPEC
) -> dict[str, float]:
    """Bytes, seconds and the servers' processor seconds per step over the `steps` after the first `warm_up`."""
    rates = np.full(warm_up + steps, 0.06, np.float32)
    schedule = VisitSchedule(num_rows=SPEC.num_rows, window_size=WINDOW_SIZE, window_stride=WINDOW_STRIDE, seed=0)
    of_steps = active_rows(schedule, warm_up + steps)
    gradients = torch.randn(NUM_ACTIVE, SPEC.dim) * 1e-3
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(spec)
        client.extend_schedule(0, rates)
        client.open_session("benchmark")
        store = make_store(client, rates)
        seconds = []
        before, used_before = loopback_bytes(), 0.0
        for step, active in enumerate(announced(of_steps, store)):
            if step == warm_up:
                used_before = processor_seconds(cluster)
                before, rows_before = loopback_bytes(), store.counters.fetched_rows + store.counters.pushed_rows
            started = time.perf_counter()
            store.weights(active.rows, step=step)
            store.apply_gradients(active.rows, gradients, step=step)
            seconds.append(time.perf_counter() - started)
        if isinstance(store, RemoteRows):
            store.flush()  # the last push
        moved, used = loopback_bytes() - before, processor_seconds(cluster) - used_before
        rows = store.counters.fetched_rows + store.counters.pushed_rows - rows_before
        store.close()
    step_time = timing(seconds[warm_up:])
    return {
        "bytes_per_step": moved / steps,
        "rows_per_step": rows / steps,
        "step_seconds": step_time.p50,
        "step_seconds_p90": step_time.p90,
        "server_seconds": used / steps,
    }


def resident(client: WeightClient, rates: np.ndarray) -> ResidentRows:
    return ResidentRows(
        client,
        SPEC,
        LearningRates(SPEC, rates),
        capacity=WINDOW_SIZE + 2 * WINDOW_STRIDE,
        prefetch_steps=PREFETCH_STEPS,
        write_back_rows=WINDOW_STRIDE,
        device=torch.device("cpu"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=at_least(2), default=2 * STEPS_PER_WINDOW, help="steps of resident rows to measure"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    keep_large_buffers()

    def remote(client: WeightClient, _: np.ndarray) -> RemoteRows:
        return RemoteRows(client)

    results = {
        "resident": measure(resident, warm_up=3 * STEPS_PER_WINDOW, steps=arguments.steps),
        "remote": measure(remote, warm_up=2, steps=32),
        "remote, stored in bfloat16": measure(remote, warm_up=2, steps=32, spec=BFLOAT16),
    }
    ratio = results["remote"]["bytes_per_step"] / results["resident"]["bytes_per_step"]
    lines = [
        f"Remote rows move {ratio:,.0f} times the bytes of resident ones. The arithmetic: 2·K·D·4 bytes a step against",
        "2·B·S/W rows of weight, momentum buffer and last step.",
        "",
        "| rows | bytes on the wire, a step | rows, a step | rows' part of a step | servers' processor time, a step |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {values['bytes_per_step']:,.0f} | {values['rows_per_step']:,.1f} | "
        f"{1e3 * values['step_seconds']:.1f} ms | {1e3 * values['server_seconds']:.1f} ms |"
        for name, values in results.items()
    ]
    write_results(
        arguments.output,
        "wire",
        f"python -m benchmarks.wire --steps {arguments.steps}",
        {**results, "ratio": ratio},
        "\n".join(lines),
    )


if __name__ == "__main__":
    main()
