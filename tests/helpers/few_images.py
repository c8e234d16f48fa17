"""Runs a module with a fifth of Fashion-MNIST, a few more images than the demo trains on.

python -m tests.helpers.few_images -m MODULE ARGUMENTS...
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from trainer.data import DATASETS, Dataset

NUM_TRAIN, NUM_TEST = 11_000, 500


def few_images(directory: Path | None) -> Dataset:
    whole = _load_all(directory)
    assert isinstance(whole.train_labels, Tensor)
    assert isinstance(whole.test_labels, Tensor)
    return replace(
        whole,
        train_images=whole.train_images[slice(NUM_TRAIN)],
        train_labels=whole.train_labels[:NUM_TRAIN],
        test_images=whole.test_images[slice(NUM_TEST)],
        test_labels=whole.test_labels[:NUM_TEST],
    )


if __name__ == "__main__":
    _load_all = DATASETS["fashion-mnist"]
    DATASETS["fashion-mnist"] = few_images
    _, _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
