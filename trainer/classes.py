"""The classes of a run's images: one for each image, the data set's labels, or those of a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.data import Dataset
from trainer.schedule import SamplingConfig
from weightserver.torch import ClassOrder, RangesOrder, read_labels

DATASET_CLASSES = "classes"
"""The --labels of a data set's own labels."""


def order_of(config: SamplingConfig, dataset: Dataset) -> RangesOrder | ClassOrder:
    """The order of the images that the window slides over; a `ClassOrder` if images share classes.

    Raises:
        ValueError: a data set without labels, or a class map that is not one for its images.
    """
    if config.labels is None:
        return dataset.order(config.order_seed)
    num_images = len(dataset.train_images)
    try:
        if config.labels != DATASET_CLASSES:
            return ClassOrder(read_labels(Path(config.labels)), config.order_seed, num_images=num_images)
        if not dataset.labelled:
            raise ValueError("these images have no labels: give a file with the class of each, or another --dataset")
        labels = dataset.train_labels.numpy()
        if labels.min() < 0:
            raise ValueError("some of these images have no labels: give a file with the class of each")
        return ClassOrder(np.unique(labels, return_inverse=True)[1], config.order_seed)  # some may have no image
    except ValueError as error:
        raise ValueError(f"--labels {config.labels}: {error}") from None
