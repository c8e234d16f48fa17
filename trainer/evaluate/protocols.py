"""The protocols by name: their settings, and how each runs in an `Evaluation`. Importing them loads no library."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.evaluate.settings import SEMI_SUPERVISED, FineTuneConfig, KnnConfig, LinearCachedConfig, LinearConfig
from trainer.settings import Settings

if TYPE_CHECKING:
    from trainer.evaluate.evaluation import Evaluation, Outcome


class Protocol(NamedTuple):
    """A way to evaluate."""

    function: str
    """MODULE:NAME."""
    settings: Settings
    """The defaults."""
    summary: str
    pixels: bool = False
    """Whether it can evaluate raw pixels."""
    images: str = ""
    """Name of the images if they have a format of their own, in --data-dir."""


PROTOCOLS = {
    "knn": Protocol(
        "trainer.evaluate.knn:knn",
        KnnConfig(),
        "Classify by nearest neighbours among the training images' features.",
        pixels=True,
    ),
    "linear": Protocol(
        "trainer.evaluate.classification:linear",
        LinearConfig(),
        "Train a linear classifier on frozen features of crops.",
        pixels=True,
    ),
    "linear-cached": Protocol(
        "trainer.evaluate.linear_cached:linear_cached",
        LinearCachedConfig(),
        "Fit a regularised linear classifier to features of whole images, for small sets.",
        pixels=True,
    ),
    "semi-supervised": Protocol(
        "trainer.evaluate.classification:fine_tune",
        SEMI_SUPERVISED,
        "Fine-tune encoder and classifier on a few labelled images.",
    ),
    "fine-tune": Protocol(
        "trainer.evaluate.classification:fine_tune",
        FineTuneConfig(),
        "Fine-tune encoder and cosine classifier on all labelled images.",
    ),
}
"""Every protocol by its name on the command line."""


def function_of(protocol: Protocol) -> Callable[[Evaluation, Any], Outcome]:
    """The protocol's function, whose libraries are loaded now."""
    module, _, name = protocol.function.partition(":")
    function: Callable[[Evaluation, Any], Outcome] = getattr(import_module(module), name)
    return function
