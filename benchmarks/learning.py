"""Trains the same settings with a few variations and several seeds, and compares what the encoders have learnt.

python -m benchmarks.learning EXPERIMENT --directory DIR [--seeds 3] [--output benchmarks/results]

Every run is one of Fashion-MNIST's, with embedded weight servers. Repeat the command after an interruption: finished
runs are kept in DIR, and an unfinished one is resumed. Seeds come one after another, so that a part of the runs already
compares all variations. The table has mean ± standard deviation over the seeds that have finished.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import save_results
from trainer.config import PRESETS, TrainConfig
from trainer.loop import train
from trainer.run.directory import SUMMARY_FILE

MEASURED = {"loss": "final loss", "knn_top1": "kNN", "linear_top1": "linear"}


@dataclass(frozen=True)
class Experiment:
    """Variations of one run."""

    title: str
    base: dict[str, Any]
    """Settings of all runs that are not those of the preset fashion-mnist."""
    variations: dict[str, dict[str, Any]]


_SMALL = {"num_images": 10_000, "num_negatives": 512, "checkpoint_every": 200}
_EPOCH_ORDER = {"window_size": 10_000, "window_stride": 10_000}
_WINDOW = {"window_size": 2_048, "window_stride": 256}

EXPERIMENTS = {
    "beginnings": Experiment(
        "Rows that begin at random, or at the embedding of their image (--init)",
        _SMALL,
        {
            f"{order}, {epochs} epochs, {init}": {"epochs": float(epochs), "init": init, **settings}
            for epochs in (2, 6, 20)
            for order, settings in (("epoch order", _EPOCH_ORDER), ("windows", _WINDOW))
            for init in ("random", "embedding")
        },
    ),
    "row_precision": Experiment(
        "Rows stored in float32 or bfloat16 (--row-precision), in the demo's run",
        {"checkpoint_every": 500},
        {
            f"{rows}, {precision}": {"rows": rows, "row_precision": precision}
            for rows in ("resident", "remote")
            for precision in ("float32", "bfloat16")
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--directory", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    experiment = EXPERIMENTS[arguments.experiment]
    for seed in range(arguments.seeds):
        for number, (name, changes) in enumerate(experiment.variations.items()):
            run(experiment, changes, seed, arguments.directory / f"{number}-{seed}")
            print(f"{name}, seed {seed}: done", flush=True)
            write(arguments.experiment, arguments.directory, arguments.output)


def run(experiment: Experiment, changes: dict[str, Any], seed: int, output: Path) -> None:
    """One run, unless it has finished."""
    if (output / SUMMARY_FILE).exists():
        return
    _, preset = PRESETS["fashion-mnist"]
    settings = experiment.base | changes
    config: TrainConfig = replace(preset, seed=seed, order_seed=seed, output=output, resume="auto", **settings)
    train(config)


def write(name: str, directory: Path, output: Path) -> None:
    """Writes the table of all runs that have finished."""
    experiment, results = EXPERIMENTS[name], {}
    for number, variation in enumerate(experiment.variations):
        files = sorted(directory.glob(f"{number}-*/{SUMMARY_FILE}"))
        summaries = [json.loads(file.read_text()) for file in files]
        if summaries:
            results[variation] = {key: [summary[key] for summary in summaries] for key in MEASURED}
    lines = [f"{experiment.title}. Mean ± standard deviation over seeds.", ""]
    lines += [f"| | {' | '.join(MEASURED.values())} | seeds |", "|---|" + "---|" * (len(MEASURED) + 1)]
    for variation, found in results.items():
        values = " | ".join(_spread(found[key], 2 if key == "loss" else 1) for key in MEASURED)
        lines.append(f"| {variation} | {values} | {len(found['loss'])} |")
    command = f"python -m benchmarks.learning {name} --directory DIR"
    save_results(output, f"learning_{name}", command, results, "\n".join(lines))


def _spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
