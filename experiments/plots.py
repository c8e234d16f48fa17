"""Plots of the tables, which read on light and on dark pages."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from experiments.cells import Table
from experiments.results import Runs, seeds_of, values
from weightserver.common.atomic_files import atomic_write

Points = dict[str, list[float]]
"""Cell's name to values."""
Curves = dict[str, list[list[float]]]
"""Cell's name to share of the run's views, mean accuracy in percent, and its standard deviation."""
_GREY, COLOUR = "#808890", "#2f81f7"
_TEXT = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tables",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(_TEXT, _GREY),
}
_LETTERS = 44
"""Letters of a cell's name in one line."""


def points(table: Table, runs: Runs) -> Points:
    """What was measured of the table's first measure."""
    measure = next(iter(table.measures))
    measured = {cell.name: list(values(runs, cell, measure).values()) for cell in table.cells}
    return {name: found for name, found in measured.items() if found}


def draw(table: Table, runs: Runs, path: Path) -> None:
    """Draws a table into an SVG file, whose description holds the numbers drawn: a point for each cell, the first at
    the top, with the standard deviation; hollow ones are one run."""
    measured = points(table, runs)
    places = range(len(measured))
    means = [statistics.mean(found) for found in measured.values()]
    spreads = [statistics.stdev(found) if len(found) > 1 else math.nan for found in measured.values()]
    faces = ["none" if len(found) == 1 else COLOUR for found in measured.values()]
    with mpl.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(4.4, 0.8 + 0.34 * len(measured)), layout="constrained")
        axis.errorbar(means, places, xerr=spreads, fmt="none", capsize=3, ecolor=COLOUR)
        axis.scatter(means, places, s=36, edgecolors=COLOUR, facecolors=faces)
        axis.set_yticks(places, [textwrap.fill(name, _LETTERS) for name in measured])
        axis.set_ylim(len(measured) - 0.4, -0.6)
        axis.set_xlabel(f"{next(iter(table.measures.values()))}, top-1 (%)")
        save(figure, path, measured)


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
    with mpl.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
        for name, curve in found.items():
            shares, means, spreads = zip(*curve, strict=True)
            lower, upper = ([mean + sign * by for mean, by in zip(means, spreads, strict=True)] for sign in (-1, 1))
            (line,) = axis.plot(shares, means, label=name)
            axis.fill_between(shares, lower, upper, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(xlabel="share of a run's views", ylabel="kNN among 10,000 training images, k = 10 (%)", xlim=(0, 1))
        axis.legend(frameon=False, labelcolor="linecolor")
        save(figure, path, found)


def save(figure: Figure, path: Path, numbers: Mapping[str, object]) -> None:
    """Writes a figure with the numbers drawn as its description, and closes it."""
    metadata: Any = {"Date": None, "Creator": None, "Description": json.dumps(numbers)}
    atomic_write(path, lambda partial: figure.savefig(partial, format="svg", transparent=True, metadata=metadata))
    plt.close(figure)
