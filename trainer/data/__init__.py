"""Data sets: listing, packing, decoding and augmenting images.

Import from it: the names below; single modules, by everything in the trainer except `rows`.
It may import: no other folder.
"""

from typing import TYPE_CHECKING

from weightserver.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.data.config import DECODED
    from trainer.data.dataset import Dataset, TrainImages
    from trainer.data.datasets import SYNTHETIC, load_dataset, load_splits
    from trainer.data.in_memory import DATASETS
    from trainer.data.synthetic import SyntheticImages

__all__ = [
    "DATASETS",
    "DECODED",
    "SYNTHETIC",
    "Dataset",
    "SyntheticImages",
    "TrainImages",
    "load_dataset",
    "load_splits",
]
_MODULES = {
    "DATASETS": "in_memory",
    "DECODED": "config",
    "SYNTHETIC": "datasets",
    "Dataset": "dataset",
    "SyntheticImages": "synthetic",
    "TrainImages": "dataset",
    "load_dataset": "datasets",
    "load_splits": "datasets",
}
__getattr__ = lazy_names(__name__, {name: f"{__name__}.{module}" for name, module in _MODULES.items()})
