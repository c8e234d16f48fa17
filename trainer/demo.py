"""The demo: trains on real images with local weight servers, on a CPU.

    python -m trainer.demo [--epochs E] [--data-dir DIR] [--output DIR]

Starts two shard processes, trains on Fashion-MNIST, prints the accuracy of the trained encoder, of the untrained one
and of raw pixels, and draws the training as OUTPUT/training.png.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from trainer.config import PRESETS
from trainer.evaluate import evaluate_features, pixel_features, untrained_encoder
from trainer.evaluate.features import encoder_features
from trainer.evaluate.table import print_table
from trainer.loop import train
from trainer.run.plot import draw_training
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import to_path
from weightserver.common.malloc import keep_large_buffers


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo and returns 0; if it fails, exits as `exit_on_error` does."""
    parser = argparse.ArgumentParser(prog="python -m trainer.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=float, help="length of the training in epochs (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument(
        "--data-dir", type=to_path, help="folder with Fashion-MNIST's files (default: search the usual places)"
    )
    parser.add_argument("--output", type=to_path, help="the run's directory (default: runs/demo-1, -2, ...)")
    options = parser.parse_args(arguments)
    keep_large_buffers()
    with exit_on_error("demo"):
        run(options.epochs, options.seed, options.data_dir, options.output or _next_output(Path("runs")))
    return 0


def run(epochs: float | None, seed: int, data_dir: Path | None, output: Path) -> None:
    """Trains, prints the table and draws the plot."""
    plot = output / "training.png"
    if plot.exists():
        raise ValueError(f"{plot} already exists: give another --output")
    _, config = PRESETS["fashion-mnist"]
    epochs = config.epochs if epochs is None else epochs
    config = replace(config, epochs=epochs, seed=seed, order_seed=seed, data_dir=data_dir, output=output)
    config = replace(config, knn_every=epochs / 10, knn_fraction=1.0)  # for a curve, whatever it takes
    result = train(config)
    untrained = untrained_encoder(result.model.config, result.dataset, config.seed)
    results = {
        "trained encoder": result.results,
        "untrained encoder": evaluate_features(encoder_features(untrained, result.dataset, result.model.config.pixels)),
        "raw pixels": evaluate_features(pixel_features(result.dataset)),
    }
    print_table(results)
    draw_training(
        output / "metrics.jsonl",
        plot,
        chance_loss=math.log(config.num_negatives),
        references={name: row["knn"].top1 for name, row in results.items()},
    )
    print(f"{result.summary['epochs']:g} epochs in {result.summary['train_seconds']:.0f} s. Plot: {plot}")


def _next_output(runs: Path) -> Path:
    number = 1
    while (output := runs / f"demo-{number}").exists():
        number += 1
    return output


if __name__ == "__main__":
    sys.exit(main())
