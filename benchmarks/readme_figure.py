"""Draws the README's figure, docs/images/results.svg, from the results of benchmarks.scale.

python -m benchmarks.readme_figure
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.figures import ROOT, results
from experiments.plots import COLOUR, STYLE, save

FILE = ROOT / "docs/images/results.svg"
_DENSE_COLOUR = "#db6d28"


class Panel(NamedTuple):
    """One quantity over the number of rows N."""

    unit: str
    ours: list[tuple[int, float]]
    """(N, value)."""
    dense: float
    """At N = 10⁶."""


def panels() -> dict[str, Panel]:
    """What benchmarks.scale measured, by title."""
    scale = results("scale")
    fresh, dense = scale["resident, fresh table"], scale["dense"][0]

    def panel(unit: str, value: Callable[[Any], float]) -> Panel:
        return Panel(unit, [(measured["rows"], value(measured)) for measured in fresh], value(dense))

    return {
        "Time of a training step": panel("ms", lambda measured: 1000 * measured["step"]["p50"]),
        "Trainer's peak memory": panel("GiB", lambda measured: measured["trainer_bytes"] / 2**30),
    }


def draw(shown: dict[str, Panel], path: Path) -> None:
    """Draws panels into an SVG file, whose description holds the numbers drawn."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(shown), figsize=(8, 2.5), layout="constrained")
        for axis, (title, panel) in zip(axes, shown.items(), strict=True):
            dense, last = (panel.ours[0][0], panel.dense), panel.ours[-1]
            axis.plot(*zip(*panel.ours, strict=True), "o-", color=COLOUR)
            axis.plot(*dense, "o", color=_DENSE_COLOUR)
            label = partial(axis.annotate, textcoords="offset points", fontsize=10)
            label(_said(panel.unit, last[1]), last, (0, 8), color=COLOUR, ha="center")
            in_memory = f"{_said(panel.unit, panel.dense)}: all rows in memory"
            label(in_memory, dense, (9, 0), color=_DENSE_COLOUR, va="center")
            axis.set(xscale="log", ylim=(0, 1.5 * panel.dense), yticks=[], xlabel="images N = rows of the classifier")
            axis.set_title(title, loc="left", color=STYLE["text.color"])
            axis.minorticks_off()
            axis.spines["left"].set_visible(False)
        save(figure, path, shown)


def _said(unit: str, value: float) -> str:
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw(panels(), FILE)
