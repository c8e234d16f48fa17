"""Cells and tables: what is trained, how it is evaluated, and what the paper claims about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import TrainConfig
from trainer.presets import PRESETS
from trainer.run.directory import flat

PIC = "pic"
"""The method of cells that this trainer trains; other methods are baselines."""
PIXELS = "pixels"
"""The method of cells that evaluate the images themselves, the same for every seed."""
LINEAR, KNN, LOSS = "linear_top1", "knn_top1", "loss"
"""Names of the measures in a run's summary."""
LESS = " − "
"""Between two measures: the difference of both is a measure, too."""
AFTER = "{after}"
"""In settings and arguments: the directory of the cell that must finish first."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A protocol of `python -m trainer.evaluate`, or `experiments.partition`, applied to a cell's encoder."""

    name: str
    """Of its result; measures are named "NAME.top1". Other arguments need another name: a result is known by it."""
    arguments: tuple[str, ...]
    """Protocol and options, without the encoder, the images and the name; of partitions the numbers of classes."""
    quick: tuple[str, ...] = ()
    """Further options that make it short."""
    all_images: bool = False
    """Whether it has all labelled training images, even if the cell was trained on a part of them."""
    validation: bool = False
    """Whether the last 5,000 of them stand for the test images: for settings that are chosen."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run, apart from its seed."""

    row: str
    column: str = ""
    method: str = PIC
    preset: str = "fashion-mnist"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the preset's; a mapping changes single fields of a nested setting."""
    evaluations: tuple[Evaluation, ...] = ()
    after: Cell | None = None
    """The cell whose directory `AFTER` stands for."""
    is_long: bool = False
    """Whether it is run after the cells of all tables."""

    @property
    def name(self) -> str:
        """Unique in a table."""
        return f"{self.row}, {self.column}" if self.column else self.row

    def identity(self, seed: int) -> str:
        """Name of the run's directory: equal for cells of several tables with the same method, settings and seed."""
        preset = [] if self.preset == Cell.preset else [self.preset]
        text = json.dumps([self.method, self.settings, *preset], sort_keys=True)
        if AFTER in text and self.after is not None:
            text = text.replace(AFTER, self.after.identity(seed))
        return f"{self.method}-{hashlib.sha256(text.encode()).hexdigest()[:10]}-{seed}"

    def config(self, seed: int) -> TrainConfig:
        """The settings of its run with this seed, without a directory. Raises TypeError for an unknown setting."""
        _, preset = PRESETS[self.preset]
        return preset.with_settings(**flat(self.settings) | {"seed": seed, "order_seed": seed})


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An effect that the paper reports: a weighted sum of cells, above zero or not below it."""

    text: str
    """The effect as a sentence, without its full stop."""
    weights: Mapping[str, float]
    """Cell's name to weight."""
    not_below: bool = False
    """Whether the claim is that nothing is lost, rather than that something is gained."""
    margin: float = 0.5
    """Points that may be lost if nothing is to be lost."""
    measure: str = LINEAR
    tried: str = ""
    """What was tried to find out why it does not hold, in sentences; shown while it does not."""


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
    """Measure to heading; the first is drawn, unless `draws` says otherwise."""
    draws: int = 1
    """Number of measures that are drawn beside each other; 1 for tables with columns of cells."""
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Cell's name to measure to the paper's number."""
    drawn_from: float | None = None
    """Lowest value of a plot with columns; lower ones are named at its edge."""
    papers_columns: Mapping[str, str] = field(default_factory=dict)
    """What the paper has in place of a column, if it differs."""
    claims: tuple[Claim, ...] = ()
    seeds: int = 1
    """Number of seeds to run whatever the effects are."""
    gives_spread: bool = False
    """Whether the spread between its seeds stands for that of cells with too few."""
    is_paired: bool = False
    """Whether claims compare two cells seed by seed once all seeds have run, corrected for the number of claims."""
    over_time: bool = False
    """Whether the kNN accuracy during training is drawn over its time. Such cells run alone."""

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        named = {*self.paper, *(name for claim in self.claims for name in claim.weights)}
        if len(set(names)) < len(names) or not named <= set(names):
            raise ValueError(f"table {self.name}: cells with equal names, or unknown ones: {named - set(names)}")

    @property
    def is_grid(self) -> bool:
        """Whether it has columns of cells, with one measure, rather than one row for each cell."""
        return any(cell.column for cell in self.cells)
