"""The protocols by name: their settings, and how each runs in an `Evaluation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.fine_tune import FineTuneConfig, fine_tune
from trainer.evaluate.knn import KnnConfig, knn
from trainer.evaluate.linear import LinearConfig, linear
from trainer.evaluate.linear_cached import LinearCachedConfig, linear_cached
from trainer.evaluate.paper.detect import detect
from trainer.evaluate.paper.detect_config import DetectConfig
from trainer.evaluate.paper.partition import PartitionConfig, partition
from trainer.evaluate.paper.saliency import SaliencyConfig, saliency
from trainer.evaluate.paper.segment import SegmentConfig, segment
from trainer.evaluate.semi_supervised import SemiSupervisedConfig, semi_supervised
from trainer.settings import Settings


class Protocol(NamedTuple):
    """A way to evaluate."""

    settings: type[Settings]
    run: Callable[[Evaluation, Any], Outcome]
    summary: str
    pixels: bool = False
    """Whether it can evaluate raw pixels."""
    labelled: bool = True
    """Whether it needs labels, and test images of the training images' classes."""
    images: str = ""
    """Name of the images if they have a format of their own, in --data-dir."""


PROTOCOLS = {
    "knn": Protocol(KnnConfig, knn, "Classify by nearest neighbours among the training images' features.", pixels=True),
    "linear": Protocol(LinearConfig, linear, "Train a linear classifier on frozen features of crops.", pixels=True),
    "linear-cached": Protocol(
        LinearCachedConfig,
        linear_cached,
        "Fit a regularised linear classifier to features of whole images, for small sets.",
        pixels=True,
    ),
    "semi-supervised": Protocol(
        SemiSupervisedConfig, semi_supervised, "Fine-tune encoder and classifier on a few labelled images."
    ),
    "fine-tune": Protocol(FineTuneConfig, fine_tune, "Fine-tune encoder and cosine classifier on all labelled images."),
    "detect": Protocol(DetectConfig, detect, "Train an object detector on Pascal VOC.", images="pascal-voc"),
    "segment": Protocol(
        SegmentConfig, segment, "Train a semantic segmentation network on Cityscapes.", images="cityscapes"
    ),
    "saliency": Protocol(
        SaliencyConfig, saliency, "Draw saliency maps and compare them with another encoder's.", labelled=False
    ),
    "partition": Protocol(
        PartitionConfig,
        partition,
        "Divide labelled classes by clustering features, for the trainer's --labels.",
        pixels=True,
        labelled=False,
    ),
}
"""Every protocol by its name on the command line."""
