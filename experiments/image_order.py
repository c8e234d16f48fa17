"""Writes an order of a run's training images in which neighbours have similar features.

    python -m experiments.image_order runs/a --output order.npy
    python -m trainer fashion-mnist --image-order order.npy

The images are halved at the median of the first principal component of their features, and each half again by its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from trainer.evaluate.features import encode
from trainer.model import load_encoder
from trainer.run.directory import ENCODER_FILE
from trainer.run.resume import run_settings
from trainer.run_dataset import dataset_of
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import atomic_write, to_path
from weightserver.core.arrays import Float64Array, Int64Array

_COMPONENTS = 32
"""Principal components of all features that are used."""
_SMALLEST = 32
"""Parts of up to so many images are sorted by their first component."""


def similar_order(features: Float64Array) -> Int64Array:
    """The numbers of features (N, d) in an order in which neighbours are similar: int64 (N,)."""
    _, directions = _principal(features)
    reduced = features @ directions[:, -_COMPONENTS:]

    def ordered(part: Int64Array) -> Int64Array:
        mean, directions = _principal(reduced[part])
        part = part[np.argsort((reduced[part] - mean) @ directions[:, -1], kind="stable")]
        if len(part) <= _SMALLEST:
            return part
        half = len(part) // 2
        return np.concatenate([ordered(part[:half]), ordered(part[half:])])

    return ordered(np.arange(len(features)))


def _principal(features: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The mean (d,), and the principal components (d, d), that of the largest variance last."""
    mean = features.mean(axis=0)
    centred = features - mean
    return mean, np.linalg.eigh(centred.T @ centred)[1]


def write_order(run: Path, output: Path) -> int:
    """Writes the order of a finished run's images, .npy of int64 (N,); returns N. Raises ValueError as `load_encoder`
    and `load_dataset` do."""
    images = dataset_of(run_settings(run))
    encoder, config = load_encoder(run / ENCODER_FILE)
    features = encode(encoder, images.train_images, images.evaluated_side, config.pixels)
    order = similar_order(features.double().numpy())
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(output, lambda path: _save(path, order))
    return len(order)


def _save(path: Path, order: Int64Array) -> None:
    with path.open("wb") as file:  # of a path without .npy, NumPy would write another
        np.save(file, order)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, or exits as `exit_on_error` does."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.image_order", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("run", type=to_path, help="directory of a run that has ended")
    parser.add_argument("--output", type=to_path, required=True, help="file to write, .npy")
    options = parser.parse_args(arguments)
    with exit_on_error("image_order"):
        number = write_order(options.run, options.output)
    print(f"{number:,} images in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
