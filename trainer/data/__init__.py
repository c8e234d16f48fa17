"""Data sets: listing, packing, decoding and augmenting images.

Import from it: the names below; single modules, by everything in the trainer except `rows`.
It may import: no other folder.
"""

from typing import TYPE_CHECKING

from weightserver.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.data.config import DECODED
    from trainer.data.datasets import DATASETS, SYNTHETIC, Dataset, TrainImages, load_dataset, load_splits
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
_ELSEWHERE = {"DECODED": "trainer.data.config", "SyntheticImages": "trainer.data.synthetic"}
__getattr__ = lazy_names(__name__, {name: _ELSEWHERE.get(name, "trainer.data.datasets") for name in __all__})
