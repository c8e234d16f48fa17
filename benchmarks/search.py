"""Compares exact search on weight servers with faiss's flat index, on the same rows and in one run.

python -m benchmarks.search [--rows 10000000] [--shards 2] [--rounds 5] [--directory DIR] [--output benchmarks/results]

D = 128, 10 neighbours by cosine, for 1, 16 and 256 queries; 10 M rows take 11 GB of disk under --directory, and faiss
5 GB of memory. The rows are written once: with --directory an interrupted run continues, and a later one finds them.
faiss is no dependency of this project: without it (pip install 'pic-weightserver[faiss]') only our times are measured.

Ours: shard processes on this machine, each on one core, that read their files (from the page cache if it holds them)
and check the rows' checksums. faiss: IndexFlatIP over unit rows in this process, on all cores, built from rows that
were fetched beforehand. Both searches are exact; `agreement` is the share of faiss's neighbours that ours are too:
faiss computes in float32, which decides between rows that are nearly equally similar. Memory is private memory
(RssAnon): that of the largest shard, sampled every 20 ms, and what the index adds to this process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.large_shard import Memory
from benchmarks.measure import Timing, at_least, in_turn, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers, own_bytes, return_free_memory
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.similarity import unit_rows

DIM, K = 128, 10
QUERIES = (1, 16, 256)
ROWS_PER_WRITE = 63 * 1_040
NUM_CENTRES = 10_000


def made_rows(first: int, count: int) -> Float32Array:
    """Rows around centres, as of a trained classifier: float32 [count, DIM], the same in every run."""
    centres = np.random.default_rng(0).standard_normal((NUM_CENTRES, DIM), np.float32)
    generator = np.random.default_rng([1, first])
    return centres[generator.integers(0, NUM_CENTRES, count)] + generator.standard_normal((count, DIM), np.float32)


def fill(client: WeightClient, num_rows: int) -> None:
    """Writes the rows that an earlier run has not written."""
    client.create_table(TableSpec(num_rows=num_rows, dim=DIM))
    client.extend_schedule(0, np.zeros(1, np.float32))
    client.open_session("search")
    written = client.describe().rows_stored  # in order, except for parts of the last write
    for first in range(written // ROWS_PER_WRITE * ROWS_PER_WRITE, num_rows, ROWS_PER_WRITE):
        rows = np.arange(first, min(first + ROWS_PER_WRITE, num_rows))
        client.write_state(rows, made_rows(first, len(rows)), np.zeros((len(rows), DIM), np.float32), 0)


@dataclass(frozen=True)
class FaissIndex:
    """faiss's flat index of all rows."""

    index: Any
    seconds: float
    """Time of fetching and adding the rows."""
    num_bytes: int
    """Memory that it takes."""

    @classmethod
    def of(cls, client: WeightClient, num_rows: int) -> FaissIndex:
        faiss = import_module("faiss")
        return_free_memory()
        before, started = own_bytes(), time.perf_counter()
        index = faiss.IndexFlatIP(DIM)
        for first in range(0, num_rows, ROWS_PER_WRITE):
            index.add(unit_rows(client.fetch(np.arange(first, min(first + ROWS_PER_WRITE, num_rows)), step=0)))
        seconds = time.perf_counter() - started
        return_free_memory()
        return cls(index, seconds, own_bytes() - before)

    def nearest(self, queries: Float32Array) -> Int64Array:
        rows: Int64Array = self.index.search(unit_rows(queries), K)[1]
        return rows


def agreement(ours: Int64Array, theirs: Int64Array) -> float:
    """The share of their neighbours that are ours too."""
    return float(np.mean([len(np.intersect1d(one, other)) / K for one, other in zip(ours, theirs, strict=True)]))


def measure(client: WeightClient, num_rows: int, rounds: int, faiss: FaissIndex | None) -> dict[str, Any]:
    """Times of both searches by number of queries, and our memory."""
    results: dict[str, Any] = {}
    generator = np.random.default_rng(2)
    for count in QUERIES:
        queries = made_rows(int(generator.integers(num_rows)), count)
        calls: dict[str, Any] = {"ours": partial(client.nearest, queries, K)}
        if faiss is not None:
            calls["faiss"] = partial(faiss.nearest, queries)
        with closing(Memory()) as memory:
            timings = in_turn(calls, rounds=rounds, warm_up=1)
            found: dict[str, Any] = {"seconds": timings, "shard_bytes": memory.most()}
        if faiss is not None:
            found["agreement"] = agreement(client.nearest(queries, K).rows, faiss.nearest(queries))
            found["ratio"] = timings["ours"].p50 / timings["faiss"].p50
        results["1 query" if count == 1 else f"{count} queries"] = found
    return results


def as_table(results: dict[str, Any], num_rows: int, faiss: FaissIndex | None) -> str:
    lines = [f"{num_rows:,} rows of {DIM} values, {K} neighbours.", ""]
    lines += [
        "| queries | ours | faiss flat | ours / faiss | agreement | memory of a shard |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        timings: dict[str, Timing] = found["seconds"]
        theirs = [str(timings["faiss"]), f"{found['ratio']:.2f}", f"{found['agreement']:.4f}"] if faiss else ["–"] * 3
        cells = [name, str(timings["ours"]), *theirs, f"{found['shard_bytes'] / 2**20:,.0f} MiB"]
        lines.append(f"| {' | '.join(cells)} |")
    if faiss is not None:
        lines += ["", f"faiss's index takes {faiss.num_bytes / 2**20:,.0f} MiB, and {faiss.seconds:.0f} s to build."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=at_least(1), default=10_000_000)
    parser.add_argument("--shards", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(2), default=5)
    parser.add_argument("--directory", type=Path, help="keep the rows here (default: a temporary folder)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    keep_large_buffers()
    with (
        tempfile.TemporaryDirectory() as temporary,
        LocalCluster(arguments.shards, arguments.directory or temporary) as cluster,
        WeightClient(cluster.addresses) as client,
    ):
        fill(client, arguments.rows)
        try:
            faiss = FaissIndex.of(client, arguments.rows)
        except ModuleNotFoundError:
            faiss = None
        results = measure(client, arguments.rows, arguments.rounds, faiss)
        index = None if faiss is None else {"seconds": faiss.seconds, "bytes": faiss.num_bytes}
    command = f"python -m benchmarks.search --rows {arguments.rows} --shards {arguments.shards}"
    command += f" --rounds {arguments.rounds}"
    table = as_table(results, arguments.rows, faiss)
    write_results(arguments.output, "search", command, results | {"faiss index": index}, table)


if __name__ == "__main__":
    main()
