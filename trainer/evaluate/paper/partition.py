"""Divides labelled classes into more, by clustering features (appendix, "Compared to Supervised Classification")."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.paper.settings import PartitionConfig
from trainer.evaluate.stored_features import StoredFeatures, store_features, write_array
from weightserver.core.arrays import Float32Array, Int64Array


def partition(evaluation: Evaluation, config: PartitionConfig) -> Outcome:
    """Writes a class for each training image: images of different labelled classes never share one.

    Each labelled class is divided in proportion to its images, by k-means of its features of length 1 (Euclidean
    distance); the features of one are in memory at a time.

    Raises:
        ValueError: images without labels, or a number of classes out of range.
    """
    dataset = evaluation.load()
    dataset.check_labelled()
    labels = dataset.train_labels.numpy()
    if labels.min() < 0:
        raise ValueError("some of these images have no labels: label or remove them, or choose another --dataset")
    images_of_class = np.bincount(labels)
    for num_classes in config.classes:
        _check(num_classes, int(np.count_nonzero(images_of_class)), len(labels))
    ranks, frozen = evaluation.ranks, evaluation.frozen()
    with evaluation.progress("features", len(labels)) as advance:
        features = store_features(
            frozen, dataset.train_images, dataset.evaluated_side, evaluation.state / "train", ranks, advance
        )
    frozen.check()
    made: list[dict[str, Any]] = []
    if ranks.is_first:
        made = [_write_partition(evaluation, config, features, labels, num_classes) for num_classes in config.classes]
    return Outcome(results={}, details={"by_setting": made})


def _check(num_classes: int, labelled: int, images: int) -> None:
    if not labelled <= num_classes <= images:
        raise ValueError(
            f"--classes {num_classes} must lie in {labelled}..{images}, from the number of labelled classes to that of "
            "the images"
        )


def _write_partition(
    evaluation: Evaluation, config: PartitionConfig, features: StoredFeatures, labels: Int64Array, num_classes: int
) -> dict[str, Any]:
    """Writes one partition; returns a line about it."""
    images_of_class = np.bincount(labels)
    parts = proportional_parts(images_of_class, num_classes)
    first = np.cumsum(parts) - parts  # the first new class of each labelled one
    assigned = np.empty(len(labels), np.int32 if num_classes < 2**31 else np.int64)
    with evaluation.progress(f"{num_classes} classes", len(labels)) as advance:
        order = np.argsort(labels, kind="stable")
        for images in np.split(order, np.cumsum(images_of_class)[:-1]):
            if len(images):
                label, values = labels[images[0]], features.take(torch.from_numpy(images)).float().numpy()
                assigned[images] = first[label] + divided(values, int(parts[label]), config.seed)
                advance(len(images))
    file = evaluation.state.parent / f"partition-{num_classes}.npy"
    write_array(file, assigned)
    sizes = np.bincount(assigned)
    return {
        "classes": num_classes,
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
        "labels": str(file),
    }


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
