"""Labelled image sets held in memory: `load_dataset(name, directory)`."""

from trainer.data.datasets import DATASETS, Dataset, load_dataset
from trainer.data.idx import DataNotFoundError

__all__ = ["DATASETS", "DataNotFoundError", "Dataset", "load_dataset"]
