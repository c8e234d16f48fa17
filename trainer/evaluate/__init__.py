"""Evaluates encoders by the protocols that the field reports (paper, appendix, Experimental Settings).

Every protocol has a module with its settings and a function from an `Evaluation` to an `Outcome`; `command` runs them.
`paper` has those that only reproduce the paper's results. Settings that are not given are chosen on images held out
from the training set, never on test images.

Import from it: the names below; `features`, `knn` and `table`, by the loop, the demo and `report`.
It may import: `data`, `export` and `run`.
"""

from typing import TYPE_CHECKING

from weightserver.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.evaluate.features import (
        FeatureSet,
        calibrate_batch_norm,
        encoder_features,
        pixel_features,
        untrained_encoder,
    )
    from trainer.evaluate.knn import knn_top1
    from trainer.evaluate.linear_cached import linear_top1
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
_ELSEWHERE = {
    "knn_top1": "trainer.evaluate.knn",
    "linear_top1": "trainer.evaluate.linear_cached",
    "ProbeResult": "trainer.evaluate.protocol",
    "split_held_out": "trainer.evaluate.protocol",
    "evaluate_features": "trainer.evaluate.table",
}
__getattr__ = lazy_names(__name__, {name: _ELSEWHERE.get(name, "trainer.evaluate.features") for name in __all__})
