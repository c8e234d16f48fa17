"""Measures what verifying the checksums of the rows that a fetch reads costs.

python -m benchmarks.checksums [--rounds 60] [--output benchmarks/results]

D = 128, one shard, 1 M stored rows, a gap of 18,000 steps to correct. Groups of 4 rows are checked, and 640 bytes of
each block: scattered rows cost most.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.measure import at_least, draw_bars, in_turn, write_results
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.malloc import keep_large_buffers

SPEC = TableSpec(num_rows=1_000_000, dim=128)
STEP = 18_000


def fill(client: WeightClient) -> None:
    client.create_table(SPEC)
    client.extend_schedule(0, np.full(STEP, 0.06, np.float32))
    client.open_session("benchmark")
    values = np.random.default_rng(0).standard_normal((50_000, SPEC.dim), dtype=np.float32)
    for first in range(0, SPEC.num_rows, len(values)):
        client.write_state(np.arange(first, first + len(values)), values, values, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=60)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    keep_large_buffers()
    generator = np.random.default_rng(1)
    requests = {
        "65,536 neighbours": np.arange(400_000, 465_536),
        "512 neighbours": np.arange(400_000, 400_512),
        "a random half of 131,072 neighbours": 400_000 + np.sort(generator.permutation(131_072)[:65_536]),
        "512 scattered over all": np.sort(generator.permutation(SPEC.num_rows)[:512]),
        "65,536 scattered over all": np.sort(generator.permutation(SPEC.num_rows)[:65_536]),
    }
    with (
        LocalCluster(1) as checking,
        LocalCluster(1, serve_options=["--no-verify-reads"]) as trusting,
        WeightClient(checking.addresses) as checked,
        WeightClient(trusting.addresses) as trusted,
    ):
        fill(checked)
        fill(trusted)
        results = {}
        for name, rows in requests.items():
            out = np.empty((len(rows), SPEC.dim), np.float32)
            calls: dict[str, Callable[[], object]] = {
                "checked": lambda rows=rows, out=out: checked.fetch(rows, step=STEP, out=out),
                "trusted": lambda rows=rows, out=out: trusted.fetch(rows, step=STEP, out=out),
            }
            results[name] = in_turn(calls, rounds=arguments.rounds)
    ratios = {name: times["checked"].p50 / times["trusted"].p50 for name, times in results.items()}
    lines = ["Fetches check by default; `--no-verify-reads` omits it.", ""]
    lines += ["| rows | checked | not checked | ratio |", "|---|---|---|---|"]
    lines += [f"| {name} | {t['checked']} | {t['trusted']} | {ratios[name]:.2f} |" for name, t in results.items()]
    lines += ["", "![Checked fetches beside trusted ones](checksums.png)"]
    command = f"python -m benchmarks.checksums --rounds {arguments.rounds}"
    write_results(arguments.output, "checksums", command, {**results, "ratios": ratios}, "\n".join(lines))
    draw_bars(arguments.output / "checksums.png", ratios, "time checked / time not checked")


if __name__ == "__main__":
    main()
