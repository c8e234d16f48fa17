"""Class maps between labels and instances: labelled classes divided by clustering (appendix, "Compared to Supervised").

    python -m experiments.partition supervised.safetensors --dataset packed --data-dir DIR --output maps --classes 4000

writes maps/partition-4000.npy, the class of each training image, for the trainer's --labels. All features are in memory
at once, in half precision: 5.3 GB for ImageNet's images and 2,048 values each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer.compute import ComputeConfig
from trainer.data import Dataset, load_dataset
from trainer.data.pixels import PixelScale
from trainer.evaluate.features import encode
from trainer.model import load_encoder
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import atomic_write
from weightserver.core.arrays import Float32Array, Int64Array

_BLOCK = 8_000
"""Images whose features are in single precision at once."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, or exits with 2 for invalid arguments, otherwise as `exit_on_error` does."""
    parser = argparse.ArgumentParser(prog="experiments.partition", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("encoder", type=Path, help="an encoder file: of a run, or of 'pic export import'")
    parser.add_argument("--dataset", default="packed", help="labelled images, as of the trainer (default: packed)")
    parser.add_argument("--data-dir", type=Path, help="the folder of the images")
    parser.add_argument("--output", type=Path, required=True, help="the folder of the class maps")
    parser.add_argument("--classes", type=int, nargs="+", required=True, help="numbers of classes")
    parser.add_argument("--seed", type=int, default=0, help="of k-means")
    options = parser.parse_args(arguments)
    with exit_on_error("partition"):
        encoder, config = load_encoder(options.encoder)
        images = load_dataset(options.dataset, options.data_dir, image_size=config.image_size)
        encoder = encoder.to(ComputeConfig().torch_device())
        options.output.mkdir(parents=True, exist_ok=True)
        write_partitions(encoder, config.pixels, images, options.classes, options.output, options.seed)
    return 0


def write_partitions(
    encoder: nn.Module, pixels: PixelScale, images: Dataset, classes: Sequence[int], directory: Path, seed: int = 0
) -> None:
    """Writes partition-NUMBER.npy for each number of classes, then partition.json with their sizes.

    Raises:
        ValueError: images without labels, or a number of classes out of range.
    """
    images.check_labelled()
    labels = images.train_labels.numpy()
    if labels.min() < 0:
        raise ValueError("some of these images have no labels: label or remove them, or choose another --dataset")
    for number in classes:
        if not (fewest := len(np.unique(labels))) <= number <= len(labels):
            raise ValueError(
                f"--classes {number} must lie in {fewest}..{len(labels)}, from the number of labelled classes to that "
                "of the images"
            )
    features = np.empty((len(labels), 0), np.float16)
    for ids in torch.arange(len(labels)).split(_BLOCK):
        found = F.normalize(encode(encoder, images.train_images, images.evaluated_side, pixels, ids=ids))
        if not features.size:
            features = np.empty((len(labels), found.shape[1]), np.float16)
        features[ids.numpy()] = found.numpy()
    sizes = dict[str, list[int]]()
    for number in classes:
        assigned = partitioned(features, labels, number, seed)
        _write_array(directory / f"partition-{number}.npy", assigned)
        of_class = np.bincount(assigned)
        sizes[f"{number} classes"] = [int(of_class.min()), int(of_class.max())]
    text = json.dumps({"partitions": len(sizes), "smallest and largest": sizes}, indent=2) + "\n"
    atomic_write(directory / "partition.json", lambda path: path.write_text(text))


def partitioned(features: np.ndarray, labels: Int64Array, num_classes: int, seed: int) -> Int64Array:
    """A class for each image, int64 [N]: images of different labels, int64 [N], never share one.

    Each labelled class is divided in proportion to its images, by k-means of its features [N, d] of length 1
    (Euclidean distance).
    """
    images_of_class = np.bincount(labels)
    parts = proportional_parts(images_of_class, num_classes)
    first = np.cumsum(parts) - parts  # the first new class of each labelled one
    assigned = np.empty(len(labels), np.int64)
    for images in np.split(np.argsort(labels, kind="stable"), np.cumsum(images_of_class)[:-1]):
        if len(images):
            label = labels[images[0]]
            assigned[images] = first[label] + divided(features[images].astype(np.float32), int(parts[label]), seed)
    return assigned


def proportional_parts(images_of_class: Int64Array, num_classes: int) -> Int64Array:
    """How many of `num_classes` each class gets: in proportion to its images, at least 1 (0 without images), int64 [C].

    Largest remainders are rounded up; nothing exceeds a class's images.
    """
    spare = images_of_class - (images_of_class > 0)  # images beyond the first
    more = num_classes - np.count_nonzero(images_of_class)
    shares = more * spare / max(1, spare.sum())
    parts = np.floor(shares).astype(np.int64)
    rounded_up = np.argsort(parts - shares, kind="stable")[: more - parts.sum()]
    parts[rounded_up] += 1
    result: Int64Array = parts + (images_of_class > 0)
    return result


def divided(values: Float32Array, num_clusters: int, seed: int) -> Int64Array:
    """The cluster of each of n vectors: float32 [n, d] to int64 [n]; all have as many vectors, give or take one.

    Clusters approximate constrained k-means (Bradley et al., 2000): vectors that would lose most by another
    cluster choose theirs first, among those with room.
    """
    from sklearn.cluster import MiniBatchKMeans  # late: it takes a second

    if num_clusters == len(values):
        return np.arange(len(values))
    if num_clusters == 1:
        return np.zeros(len(values), np.int64)
    means = MiniBatchKMeans(num_clusters, random_state=seed, n_init=1, batch_size=max(1024, num_clusters)).fit(values)
    return _balanced(means.transform(values))


def _balanced(distances: Float32Array) -> Int64Array:
    """Clusters of as many vectors each, give or take one: of distances (n, k), int64 [n]."""
    size, num_larger = divmod(len(distances), distances.shape[1])
    sizes = np.zeros(distances.shape[1], np.int64)
    clusters = np.empty(len(distances), np.int64)
    nearest = np.partition(distances, 1, axis=1)
    for vector in np.argsort(nearest[:, 0] - nearest[:, 1], kind="stable"):
        has_room = sizes < size + (num_larger > 0)
        cluster = int(np.where(has_room, distances[vector], np.inf).argmin())
        num_larger -= int(sizes[cluster] == size)
        sizes[cluster] += 1
        clusters[vector] = cluster
    return clusters


def _write_array(path: Path, array: Int64Array) -> None:
    def write(partial: Path) -> None:
        with partial.open("wb") as file:  # np.save would add a suffix to the name
            np.save(file, array)

    atomic_write(path, write)


if __name__ == "__main__":
    sys.exit(main())
