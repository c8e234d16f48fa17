"""Plots of the tables, for light and for dark pages: what was measured, and the paper's numbers beside it."""

from __future__ import annotations

import json
import math
import re
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
from experiments.results import Results
from weightserver.common.atomic_files import atomic_write

Series = dict[str, dict[str, list[float]]]
"""Row to column to values; a table without columns has one, ""."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tables",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_TEXT: Any = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_GREY = "#808890"
"""Reads on light and on dark pages."""
ON_DARK = "#9198a1"
_COLOURS = ("#2f81f7", "#d1690e", "#3fa45b", "#a371f7", "#e5534b", "#1b9aaa", "#b08800", "#808890")
_LETTERS_OF_A_ROW = 44
"""Letters of a row's name in one line."""
_LETTERS_OF_A_LINE = 75
"""Letters of a legend that have room in the width of one panel."""


def draw(results: Results, path: Path, *, text_colour: str = _GREY) -> None:
    """Draws what the table draws into an SVG file, whose description holds the numbers drawn."""
    measured, paper = series(results)
    with mpl.rc_context(_STYLE | dict.fromkeys(_TEXT, text_colour)):
        if results.table.over_time:
            _draw_curves(measured, path)
        else:
            _draw_panels(results.table, measured, paper, path)


def _draw_panels(table: Table, measured: Series, paper: Series, path: Path) -> None:
    """Draws what was measured, and the paper's numbers beside it."""
    panels = [("here", measured)] + ([("paper", paper)] if paper else [])
    height = 2.8 if table.is_grid else 0.8 + 0.34 * len(measured)
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4.4 * len(panels), height),
        squeeze=False,
        layout="constrained",
        sharey=not table.is_grid,  # the same rows beside each other
    )
    for axis, (title, panel) in zip(axes[0], panels, strict=True):
        if table.is_grid:
            _draw_lines(axis, panel, table, is_papers=panel is paper)
        else:
            _draw_points(axis, panel, list(measured), marks_single=panel is measured)
        axis.set_title(title, loc="left", fontsize=9)
    if not table.is_grid:
        axes[0][0].set_ylim(len(measured) - 0.4, -0.6)
    axes[0][0].set_xlabel("" if table.is_grid or table.draws > 1 else _heading(table))
    axes[0][0].set_ylabel(_heading(table) if table.is_grid else "")
    handles, labels = axes[0][0].get_legend_handles_labels()
    if len(labels) > 1:
        columns = max(1, _LETTERS_OF_A_LINE * len(panels) // (max(map(len, labels)) + 8))
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), columns), frameon=False)
    _save(figure, path, [measured, paper])


def _draw_curves(curves: Series, path: Path) -> None:
    """Draws a line of values over seconds for each row."""
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for number, (row, values) in enumerate(curves.items()):
        seconds, means = [float(column) for column in values], [statistics.mean(each) for each in values.values()]
        axis.plot(seconds, means, color=_COLOURS[number % len(_COLOURS)], marker="o", markersize=3, label=row)
    axis.set_xlabel("seconds of training on one core")
    axis.set_ylabel("kNN top-1 of training images (%)")
    axis.legend(frameon=False, loc="lower right")
    _save(figure, path, [curves, {}])


def _save(figure: Figure, path: Path, numbers: list[Series]) -> None:
    metadata = {"Date": None, "Creator": None, "Description": json.dumps(numbers)}
    atomic_write(path, lambda partial: figure.savefig(partial, format="svg", transparent=True, metadata=metadata))
    plt.close(figure)


def drawn(path: Path) -> list[Series]:
    """The numbers that a plot shows: what was measured, and the paper's."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"{path} is no plot of a table: draw it with python -m experiments page")
    numbers: list[Series] = json.loads(found.group(1).replace("&quot;", '"').replace("&amp;", "&"))
    return numbers


def series(results: Results) -> tuple[Series, Series]:
    """What was measured and the paper's numbers, by column, or by heading if several measures are drawn; over time,
    values by second."""
    table = results.table
    if table.over_time:
        return _curves(results), {}
    measured: Series = {}
    paper: Series = {}
    for measure, heading in list(table.measures.items())[: table.draws]:
        for cell in table.cells:
            column = heading if table.draws > 1 else cell.column
            if values := results.values(cell.name, measure):
                measured.setdefault(cell.row, {})[column] = values
            if (number := table.paper.get(cell.name, {}).get(measure)) is not None:
                paper.setdefault(cell.row, {})[column] = [number]
    return measured, paper


def _curves(results: Results) -> Series:
    """Row to second to kNN accuracy, of each cell's first run."""
    curves: Series = {}
    for cell in results.table.cells:
        for _, run in sorted(results.runs.get(cell.name, {}).items())[:1]:
            curves[cell.row] = {f"{second:g}": [value] for second, value in run.get("curve", [])}
    return curves


def _heading(table: Table) -> str:
    heading = next(iter(table.measures.values()))
    return {"linear": "linear, top-1 (%)"}.get(heading, heading)


def _draw_lines(axis: Axes, panel: Series, table: Table, *, is_papers: bool) -> None:
    """A line for each row over the columns that have values; points below the edge of our panel are named there."""
    present = {column for values in panel.values() for column in values}
    columns = [column for column in dict.fromkeys(cell.column for cell in table.cells) if column in present]
    rows = list(dict.fromkeys(cell.row for cell in table.cells))
    lowest = None if is_papers else table.drawn_from
    for row, values in panel.items():
        number = rows.index(row)
        colour = _COLOURS[number % len(_COLOURS)]
        means = {columns.index(column): statistics.mean(found) for column, found in values.items()}
        axis.errorbar(
            list(means),
            list(means.values()),
            yerr=[_deviation(found) for found in values.values()],
            marker="o",
            capsize=3,
            label=row,
            color=colour,
        )
        for place, mean in means.items():
            if lowest is not None and mean < lowest:
                axis.annotate(
                    f"{mean:.1f} ↓",
                    (place, lowest),
                    xytext=(-3, 2 + 10 * (number % 2)),
                    textcoords="offset points",
                    ha="right",
                    fontsize=8,
                    color=colour,
                )
    axis.set_xticks(
        range(len(columns)), [table.papers_columns.get(name, name) if is_papers else name for name in columns]
    )
    axis.set_ylim(bottom=lowest)
    axis.margins(x=0.08)


def _draw_points(axis: Axes, panel: Series, rows: Sequence[str], *, marks_single: bool) -> None:
    """A point for each row and column, the first of `rows` at the top; hollow ones are of one value."""
    columns = list(dict.fromkeys(column for values in panel.values() for column in values))
    for column, colour in zip(columns, _COLOURS, strict=False):
        found = {place: panel[row][column] for place, row in enumerate(rows) if column in panel.get(row, {})}
        axis.errorbar(
            [statistics.mean(values) for values in found.values()],
            list(found),
            xerr=[_deviation(values) or math.nan for values in found.values()],
            fmt="none",
            capsize=3,
            ecolor=colour,
        )
        axis.scatter(
            [statistics.mean(values) for values in found.values()],
            list(found),
            s=36,
            edgecolors=colour,
            facecolors=["none" if marks_single and len(values) == 1 else colour for values in found.values()],
            label=column,
        )
    axis.set_yticks(range(len(rows)), [textwrap.fill(row, _LETTERS_OF_A_ROW) for row in rows])


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
