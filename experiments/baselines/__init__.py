"""Other methods in the trainer's harness: same encoder, images, augmentation, schedule, views seen and evaluation.

    python -m experiments.baselines METHOD PRESET --OPTIONS     # the options of python -m trainer

Losses and momentum encoder of SimCLR and MoCo v2 are lightly's (extra `experiments`).
"""

from experiments.baselines.training import METHODS, REFERENCES, reference_features, train_baseline

__all__ = ["METHODS", "REFERENCES", "reference_features", "train_baseline"]
