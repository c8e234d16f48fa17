"""The classes of a run's images: one for each image, the data set's labels, or those of a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data import Dataset
from trainer.schedule import SamplingConfig
from weightserver.torch import ClassOrder, RangesOrder, read_labels

DATASET_CLASSES = "classes"
"""The --labels of a data set's own labels."""


@dataclass(frozen=True)
class RunClasses:
    """The classes of a run's images, and their rows."""

    order: RangesOrder | ClassOrder
    """The order of the images that the window slides over; a `ClassOrder` if images share classes."""
    rows: RangesOrder
    """Row <-> class."""
    digest: str = ""
    """Digest of the class map; empty if each image is its own class."""

    @property
    def shared(self) -> ClassOrder | None:
        """`order`, if images share classes."""
        return self.order if isinstance(self.order, ClassOrder) else None

    @property
    def number(self) -> int:
        return self.rows.num_rows


def classes_of(config: SamplingConfig, dataset: Dataset) -> RunClasses:
    """The classes of the images to train on.

    Raises:
        ValueError: a data set without labels, or a class map that is not one for its images.
    """
    if config.labels is None:
        order = dataset.order(config.order_seed)
        return RunClasses(order, order)
    try:
        shared = _class_order(config.labels, dataset, config.order_seed)
    except ValueError as error:
        raise ValueError(f"--labels {config.labels}: {error}") from None
    return RunClasses(shared, RangesOrder([shared.num_classes], config.order_seed), shared.digest)


def _class_order(labels: str, dataset: Dataset, order_seed: int) -> ClassOrder:
    if labels != DATASET_CLASSES:
        return ClassOrder(read_labels(Path(labels)), order_seed, num_images=len(dataset.train_images))
    if not dataset.labelled:
        raise ValueError("these images have no labels: give a file with the class of each, or another --dataset")
    found = dataset.train_labels.numpy()
    if found.min() < 0:
        raise ValueError("some of these images have no labels: give a file with the class of each")
    return ClassOrder(np.unique(found, return_inverse=True)[1], order_seed)  # some classes may have no image
