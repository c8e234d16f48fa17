"""Data sets: listing, packing, decoding and augmenting images.

Import from it: the names below; single modules, by everything in the trainer except `rows`.
It may import: no other folder.
"""

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
