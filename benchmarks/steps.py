"""Measures a step of the preset fashion-mnist with each row store, with the weight servers on the trainer's cores.

python -m benchmarks.steps [--rounds 3] [--steps 200] [--output benchmarks/results]

The peer is `dense`: all 60,000 rows in the trainer's memory, updated by torch.optim.SGD, without servers. Runs take
turns; the first 50 steps of each are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Timing, at_least, timing, write_results

STORES = ("dense", "resident", "remote")
WARM_UP = 50


def run(rows: str, steps: int) -> list[dict[str, Any]]:
    """The records of one run, one per step."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "run"
        command = [sys.executable, "-m", "trainer", "fashion-mnist", "--rows", rows, "--steps", str(steps)]
        command += ["--log-every", "1", "--no-evaluate", "--output", str(output)]
        subprocess.run(command, check=True, capture_output=True)
        return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(WARM_UP + 2), default=200)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in STORES}
    for _ in range(arguments.rounds):
        for name in STORES:
            records[name] += run(name, arguments.steps)
    seconds = {name: [record["seconds"] for record in kept] for name, kept in records.items()}
    times: dict[str, Timing] = {name: timing(values) for name, values in seconds.items()}
    waits = {
        name: sum(record["row_wait_seconds"] for record in kept) / sum(seconds[name]) for name, kept in records.items()
    }
    lines = ["| rows | time of a step | ratio to dense | waiting for rows |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {times[name]} | {times[name].p50 / times['dense'].p50:.2f} | {waits[name]:.2%} |"
        for name in STORES
    ]
    write_results(
        arguments.output,
        "steps",
        f"python -m benchmarks.steps --rounds {arguments.rounds} --steps {arguments.steps}",
        {"step": times, "row_wait_share": waits},
        "\n".join(lines),
    )


if __name__ == "__main__":
    main()
