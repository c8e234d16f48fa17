"""The protocols by name: their settings, and how each runs in an `Evaluation`. Importing them loads no library."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

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
    """Has a function of the protocol's name."""
    settings: type[Settings]
    summary: str
    pixels: bool = False
    """Whether it can evaluate raw pixels."""
    images: str = ""
    """Name of the images if they have a format of their own, in --data-dir."""


PROTOCOLS = {
    "knn": Protocol(
        "trainer.evaluate.knn",
        KnnConfig,
        "Classify by nearest neighbours among the training images' features.",
        pixels=True,
    ),
    "linear": Protocol(
        "trainer.evaluate.classification",
        LinearConfig,
        "Train a linear classifier on frozen features of crops.",
        pixels=True,
    ),
    "linear-cached": Protocol(
        "trainer.evaluate.linear_cached",
        LinearCachedConfig,
        "Fit a regularised linear classifier to features of whole images, for small sets.",
        pixels=True,
    ),
    "semi-supervised": Protocol(
        "trainer.evaluate.classification",
        SemiSupervisedConfig,
        "Fine-tune encoder and classifier on a few labelled images.",
    ),
    "fine-tune": Protocol(
        "trainer.evaluate.classification",
        FineTuneConfig,
        "Fine-tune encoder and cosine classifier on all labelled images.",
    ),
}
"""Every protocol by its name on the command line."""


def function_of(name: str, protocol: Protocol) -> Callable[[Evaluation, Any], Outcome]:
    """The function of the protocol `name`, whose libraries are loaded now."""
    function: Callable[[Evaluation, Any], Outcome] = getattr(import_module(protocol.module), name.replace("-", "_"))
    return function
