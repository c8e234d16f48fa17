"""Image sets to train on: `load_dataset(name, directory)`."""

from trainer.data.datasets import DATASETS, SYNTHETIC, Dataset, TrainImages, load_dataset
from trainer.data.idx import DataNotFoundError
from trainer.data.synthetic import SyntheticImages

__all__ = [
    "DATASETS",
    "SYNTHETIC",
    "DataNotFoundError",
    "Dataset",
    "SyntheticImages",
    "TrainImages",
    "load_dataset",
]
