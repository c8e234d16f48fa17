"""Data sets: `load_dataset(name, directory)` loads one by name."""

from trainer.data.datasets import DATASETS, DECODED, SYNTHETIC, Dataset, TrainImages, load_dataset
from trainer.data.idx import DataNotFoundError
from trainer.data.synthetic import SyntheticImages

__all__ = [
    "DATASETS",
    "DECODED",
    "SYNTHETIC",
    "DataNotFoundError",
    "Dataset",
    "SyntheticImages",
    "TrainImages",
    "load_dataset",
]
