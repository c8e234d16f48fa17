"""The protocols by name: their settings, and how each runs in an `Evaluation`. Importing them loads no library."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.evaluate.paper.settings import DetectConfig, SegmentConfig
from trainer.evaluate.settings import (
    FineTuneConfig,
    KnnConfig,
    LinearCachedConfig,
    LinearConfig,
    SemiSupervisedConfig,
)
from trainer.settings import Settings

if TYPE_CHECKING:
    from trainer.evaluate.evaluation import Evaluation, Outcome


class Protocol(NamedTuple):
    """A way to evaluate."""

    module: str
    """In `trainer.evaluate`; has a function of the protocol's name."""
    settings: type[Settings]
    summary: str
    pixels: bool = False
    """Whether it can evaluate raw pixels."""
    images: str = ""
    """Name of the images if they have a format of their own, in --data-dir."""


PROTOCOLS = {
    "knn": Protocol("knn", KnnConfig, "Classify by nearest neighbours among the training images' features.", True),
    "linear": Protocol("classification", LinearConfig, "Train a linear classifier on frozen features of crops.", True),
    "linear-cached": Protocol(
        "linear_cached",
        LinearCachedConfig,
        "Fit a regularised linear classifier to features of whole images, for small sets.",
        pixels=True,
    ),
    "semi-supervised": Protocol(
        "classification", SemiSupervisedConfig, "Fine-tune encoder and classifier on a few labelled images."
    ),
    "fine-tune": Protocol(
        "classification", FineTuneConfig, "Fine-tune encoder and cosine classifier on all labelled images."
    ),
    "detect": Protocol("paper.detect", DetectConfig, "Train an object detector on Pascal VOC.", images="pascal-voc"),
    "segment": Protocol(
        "paper.segment", SegmentConfig, "Train a semantic segmentation network on Cityscapes.", images="cityscapes"
    ),
}
"""Every protocol by its name on the command line."""


def function_of(name: str) -> Callable[[Evaluation, Any], Outcome]:
    """The function of the protocol `name`, whose libraries are loaded now."""
    module = import_module(f"trainer.evaluate.{PROTOCOLS[name].module}")
    function: Callable[[Evaluation, Any], Outcome] = getattr(module, name.replace("-", "_"))
    return function
