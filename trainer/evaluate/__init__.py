"""Evaluates features by kNN and linear probe, with the same protocol for every set of features.

Settings of a protocol (k, the strength of regularisation) are chosen for each set of features on images held out from
the training set; then the whole training set is used. Nothing is ever chosen on test images.

Import from it: the names below; `features`, `knn` and `table`, by the loop, the demo and `report`.
It may import: `data` and `run`.
"""

from trainer.evaluate.features import (
    FeatureSet,
    calibrate_batch_norm,
    encoder_features,
    pixel_features,
    untrained_encoder,
)
from trainer.evaluate.knn import knn_top1
from trainer.evaluate.linear import linear_top1
from trainer.evaluate.protocol import ProbeResult, split_held_out
from trainer.evaluate.table import evaluate_features

__all__ = [
    "FeatureSet",
    "ProbeResult",
    "calibrate_batch_norm",
    "encoder_features",
    "evaluate_features",
    "knn_top1",
    "linear_top1",
    "pixel_features",
    "split_held_out",
    "untrained_encoder",
]
