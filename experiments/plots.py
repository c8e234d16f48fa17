"""Plots of the tables, which read on light and on dark pages: what was measured, and the paper's numbers beside it."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.cells import Table
from experiments.results import Runs, seeds_of, values
from weightserver.common.atomic_files import atomic_write

Points = dict[str, list[float]]
"""Cell's name to values."""
Curves = dict[str, list[list[float]]]
"""Cell's name to share of the run's views, mean accuracy in percent, and its standard deviation."""
_GREY, _COLOUR = "#808890", "#2f81f7"
_TEXT = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tables",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(_TEXT, _GREY),
}
_LETTERS = 44
"""Letters of a cell's name in one line."""


def points(table: Table, runs: Runs) -> list[Points]:
    """What was measured of the table's first measure, and the paper's numbers."""
    measure = next(iter(table.measures))
    measured = {cell.name: list(values(runs, cell, measure).values()) for cell in table.cells}
    paper = {name: [numbers[measure]] for name, numbers in table.paper.items() if measure in numbers}
    return [{name: found for name, found in measured.items() if found}, paper]


def draw(table: Table, runs: Runs, path: Path) -> None:
    """Draws a table into an SVG file, whose description holds the numbers drawn."""
    measured, paper = points(table, runs)
    panels = {"here": measured} | ({"paper": paper} if paper else {})
    with mpl.rc_context(_STYLE):
        size = (4.4 * len(panels), 0.8 + 0.34 * len(measured))
        figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained", sharey=True)
        for axis, (title, panel) in zip(axes[0], panels.items(), strict=True):
            _draw_points(axis, panel, list(measured))
            axis.set_title(title, loc="left", fontsize=9)
        axes[0][0].set_ylim(len(measured) - 0.4, -0.6)
        axes[0][0].set_xlabel(f"{next(iter(table.measures.values()))}, top-1 (%)")
        _save(figure, path, [measured, paper])


def curves(table: Table, runs: Runs) -> Curves:
    """Accuracy by nearest neighbours while cells were trained: of cells that have run with two seeds at least."""
    found: Curves = {}
    for cell in table.cells:
        recorded = [runs[cell.identity(seed)].get("curve") for seed in seeds_of(runs, cell)]
        of_seeds = [dict(curve) for curve in recorded if curve]
        if len(of_seeds) > 1:
            shares = [share for share in of_seeds[0] if all(share in curve for curve in of_seeds)]
            by_share = {share: [curve[share] for curve in of_seeds] for share in shares}
            found[cell.name] = [[share, statistics.mean(at), statistics.stdev(at)] for share, at in by_share.items()]
    return found


def draw_curves(found: Curves, path: Path) -> None:
    """Draws accuracies over time into an SVG file: means over seeds, in bands of a standard deviation to each side."""
    with mpl.rc_context(_STYLE):
        figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
        for name, curve in found.items():
            shares, means, spreads = zip(*curve, strict=True)
            lower, upper = ([mean + sign * by for mean, by in zip(means, spreads, strict=True)] for sign in (-1, 1))
            (line,) = axis.plot(shares, means, label=name)
            axis.fill_between(shares, lower, upper, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(xlabel="share of a run's views", ylabel="kNN among the training images (%)", xlim=(0, 1))
        axis.legend(frameon=False, labelcolor="linecolor")
        _save(figure, path, found)


def _save(figure: Figure, path: Path, numbers: list[Points] | Curves) -> None:
    """Writes a figure with the numbers drawn as its description, and closes it."""
    metadata: Any = {"Date": None, "Creator": None, "Description": json.dumps(numbers)}
    atomic_write(path, lambda partial: figure.savefig(partial, format="svg", transparent=True, metadata=metadata))
    plt.close(figure)


def _draw_points(axis: Axes, panel: Points, names: Sequence[str]) -> None:
    """A point for each cell, the first of `names` at the top, with the standard deviation; hollow ones are one run."""
    found = {place: panel[name] for place, name in enumerate(names) if name in panel}
    means = [statistics.mean(values) for values in found.values()]
    spreads = [statistics.stdev(values) if len(values) > 1 else math.nan for values in found.values()]
    axis.errorbar(means, list(found), xerr=spreads, fmt="none", capsize=3, ecolor=_COLOUR)
    faces = ["none" if len(values) == 1 else _COLOUR for values in found.values()]
    axis.scatter(means, list(found), s=36, edgecolors=_COLOUR, facecolors=faces)
    axis.set_yticks(range(len(names)), [textwrap.fill(name, _LETTERS) for name in names])
