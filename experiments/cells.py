"""Cells and tables: what is trained, how it is evaluated, and what the paper claims about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import TrainConfig
from trainer.data.config import SIZES
from trainer.presets import PRESETS
from trainer.run.directory import flat

PIC = "pic"
"""The method of cells that this trainer trains; other methods are baselines."""
PIXELS = "pixels"
"""The method of cells that evaluate the images themselves, the same for every seed."""
UNTRAINED = "untrained"
"""The method of cells that evaluate the encoder as it starts."""
LINEAR, KNN, LOSS = "linear_top1", "knn_top1", "loss"
"""Names of the measures in a run's summary."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A protocol of `python -m trainer.evaluate`, applied to a cell's encoder."""

    name: str
    """Name of the result; its measures are "NAME.top1". Other arguments need another name: a result is known by it."""
    arguments: tuple[str, ...]
    """Protocol and options, without the encoder, the images and the name."""
    quick: tuple[str, ...] = ()
    """Further options that make it short."""
    all_images: bool = False
    """Whether it has all labelled training images, even if the cell was trained on a part of them."""
    validation: bool = False
    """Whether the last 5,000 of them stand for the test images: for settings that are chosen."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run, apart from its seed."""

    name: str
    """Unique in a table."""
    method: str = PIC
    preset: str = "fashion-mnist"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the preset's; a mapping changes single fields of a nested setting."""
    evaluations: tuple[Evaluation, ...] = ()

    def identity(self, seed: int) -> str:
        """Names a run and its directory; equal for cells of several tables with the same method, settings and seed."""
        preset = [] if self.preset == Cell.preset else [self.preset]
        text = json.dumps([self.method, self.settings, *preset], sort_keys=True)
        return f"{self.method}-{hashlib.sha256(text.encode()).hexdigest()[:10]}-{seed}"

    def config(self, seed: int) -> TrainConfig:
        """The settings of its run with this seed, without a directory. Raises TypeError for an unknown setting."""
        _, preset = PRESETS[self.preset]
        return preset.with_settings(**flat(self.settings) | {"seed": seed, "order_seed": seed})

    @property
    def num_images(self) -> int:
        """N, the images that it is trained on."""
        data = self.config(0).data
        return data.num_images or SIZES[data.dataset]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim that one cell is better than another."""

    text: str
    """The effect as a sentence, without its full stop."""
    better: str
    worse: str
    """The names of the two cells."""
    measure: str = LINEAR
    beyond: tuple[str, str] | None = None
    """Another pair of cells: the claim is that the first pair's difference is larger than theirs."""
    paper: str = ""
    """What the paper reports of it, in its words and numbers; empty where it has no such comparison."""

    @property
    def names(self) -> tuple[str, ...]:
        """The cells of which all runs are needed."""
        return (self.better, self.worse, *(self.beyond or ()))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells that are compared with each other, and with the paper's."""

    name: str
    title: str
    source: str = ""
    """Where in the paper; empty for a comparison that it does not have."""
    text: str = ""
    """What corresponds to what, in Markdown."""
    cells: tuple[Cell, ...]
    measures: Mapping[str, str] = field(default_factory=lambda: {LINEAR: "linear", KNN: "kNN", LOSS: "loss"})
    """Measure to heading; the first is drawn."""
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Cell's name to measure to the paper's number."""
    claims: tuple[Claim, ...] = ()
    seeds: int = 1
    """Seeds that are run of each cell. Its claims are judged once the seeds of both cells have run, two at least."""

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        named = {*self.paper, *(name for claim in self.claims for name in claim.names)}
        if len(set(names)) < len(names) or not named <= set(names):
            raise ValueError(f"table {self.name}: cells with equal names, or unknown ones: {named - set(names)}")
