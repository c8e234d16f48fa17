"""Compares numbers of rows per block: scattered and contiguous fetches and durable pushes, and the disk that rows take.

python -m benchmarks.blocks [--rows-per-block 1 3 4 7 8 15 16 31 63] [--dtypes float32 bfloat16] [--num-stored 262144]
    [--rounds 20] [--output benchmarks/results]

One shard for each case, all at once and called in turn, D = 128. The peer is the default, 63 rows of float32. 3, 7, 15
and 31 rows of float32 just fit into whole pages of 4 KiB, as 63 do; 4, 8 and 16 begin another page. The files stay in
the page cache: a disk that is slow to seek adds as much for any block, one with little bandwidth adds in proportion to
a block's bytes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.measure import Timing, at_least, in_turn, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.blocks import BlockCodec

DIM = 128
NUM_ROWS = 4_096
"""Rows of a fetch or push."""
FILL_ROWS = 1 << 14
DEFAULT = "float32, 63 rows"
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Measured:
    """One number of rows per block."""

    block_bytes: int
    disk_bytes_per_row: float
    """After all rows were written once, in order."""
    disk_bytes_per_row_in_the_end: float
    """After the pushes, with the pages that they freed."""
    seconds: dict[str, Timing]


@dataclass
class Case:
    """A table on a shard of its own."""

    client: WeightClient
    spec: TableSpec
    num_stored: int
    step: int = 1

    def fill(self) -> float:
        """Stores all rows; returns the disk bytes of each."""
        generator = np.random.default_rng(0)
        self.client.create_table(self.spec)
        self.client.extend_schedule(0, np.full(10_000, 0.06, np.float32))
        self.client.open_session("benchmark")
        for first in range(0, self.num_stored, FILL_ROWS):
            rows = np.arange(first, min(first + FILL_ROWS, self.num_stored))
            values = generator.standard_normal((2, len(rows), DIM), dtype=np.float32)
            self.client.write_state(rows, values[0], values[1], 0)
        return self.disk_bytes_per_row()

    def disk_bytes_per_row(self) -> float:
        return self.client.describe().disk_bytes / self.num_stored

    def push(self, rows: Int64Array, gradients: Float32Array) -> None:
        self.client.push_gradients(rows, gradients, step=self.step)
        self.step += 1


def measure(
    rows_per_block: Sequence[int], dtypes: Sequence[Dtype], num_stored: int, rounds: int
) -> dict[str, Measured]:
    generator = np.random.default_rng(1)
    patterns = {
        "scattered": np.sort(generator.choice(num_stored, NUM_ROWS, replace=False)),
        "contiguous": np.arange(NUM_ROWS) + num_stored // 3,
    }
    gradients = generator.standard_normal((NUM_ROWS, DIM), dtype=np.float32)
    with ExitStack() as stack:
        cases: dict[str, Case] = {}
        for dtype in dtypes:
            for size in rows_per_block:
                cluster = stack.enter_context(LocalCluster(1, stack.enter_context(tempfile.TemporaryDirectory())))
                client = stack.enter_context(WeightClient(cluster.addresses))
                spec = TableSpec(num_rows=num_stored, dim=DIM, rows_per_block=size, dtype=dtype)
                cases[f"{dtype}, {size} rows"] = Case(client, spec, num_stored)
        filled = {name: case.fill() for name, case in cases.items()}
        seconds: dict[str, dict[str, Timing]] = {name: {} for name in cases}
        for pattern, rows in patterns.items():
            fetches: dict[str, Callable[[], object]] = {
                name: partial(case.client.fetch, rows, step=9_999) for name, case in cases.items()
            }
            pushes: dict[str, Callable[[], object]] = {
                name: partial(case.push, rows, gradients) for name, case in cases.items()
            }
            for what, calls in ((f"fetch, {pattern}", fetches), (f"push, {pattern}", pushes)):
                for name, timing in in_turn(calls, rounds=rounds).items():
                    seconds[name][what] = timing
        return {
            name: Measured(BlockCodec(case.spec).num_bytes, filled[name], case.disk_bytes_per_row(), seconds[name])
            for name, case in cases.items()
        }


def as_table(results: dict[str, Measured]) -> str:
    whats = list(next(iter(results.values())).seconds)
    peer = results.get(DEFAULT) or next(iter(results.values()))
    lines = [
        f"{NUM_ROWS:,} rows of {DIM} values a call: median (10th–90th percentile), and its ratio to the first case of "
        "the default.",
        "",
        f"| case | block | disk per row | after the pushes | {' | '.join(whats)} |",
        f"|---|---|---|---|{'---|' * len(whats)}",
    ]
    for name, one in results.items():
        times = [f"{one.seconds[what]}, {one.seconds[what].p50 / peer.seconds[what].p50:.2f}" for what in whats]
        disk = f"{one.disk_bytes_per_row:,.0f} B | {one.disk_bytes_per_row_in_the_end:,.0f} B"
        lines.append(f"| {name} | {one.block_bytes:,} B | {disk} | {' | '.join(times)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows-per-block", type=int, nargs="+", default=[1, 3, 4, 7, 8, 15, 16, 31, 63])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--num-stored", type=at_least(2 * NUM_ROWS), default=1 << 18)
    parser.add_argument("--rounds", type=at_least(2), default=20)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    keep_large_buffers()
    sizes, dtypes = arguments.rows_per_block, arguments.dtypes
    results = measure(sizes, dtypes, arguments.num_stored, arguments.rounds)
    command = f"python -m benchmarks.blocks --rows-per-block {' '.join(map(str, sizes))} --dtypes {' '.join(dtypes)}"
    command += f" --num-stored {arguments.num_stored} --rounds {arguments.rounds}"
    documents = {name: asdict(one) for name, one in results.items()}
    write_results(arguments.output, "blocks", command, documents, as_table(results))


if __name__ == "__main__":
    main()
