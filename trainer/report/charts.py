"""A run's curves as SVG to embed in a page: without scripts, with text in the page's colour."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from trainer.run.plot import ACCURACY_KEY, FEWEST_TO_SMOOTH, smoothed
from trainer.run.prometheus import STAGES
from weightserver.core.arrays import Float64Array

Record = dict[str, Any]

_MAX_POINTS = 400
_INK = "#010203"
"""Placeholder for the page's text colour."""
_BLUE, _ORANGE = "#4c8bd6", "#e08a2e"
_STAGE_COLOURS = dict(
    zip(STAGES, ("#59a14f", "#e15759", "#4e79a7", "#76a5d0", "#b07aa1", "#9c9c9c"), strict=True)
)  # legible on white and on black


_MONITORS = {
    "online_top1": ("Online linear probe", "of training views; the run does not see its labels", "top-1 (%)"),
    "instance_top1": ("Instance top-1", "images whose own class is first of the K", "images (%)"),
    "rankme": ("RankMe", "effective number of dimensions of the embeddings", "dimensions"),
    "feature_std": ("Feature standard deviation", "of L2-normalised embeddings; 0: collapsed", "std"),
    "mean_cosine": ("Mean cosine", "of different images' embeddings; 1: collapsed", "cosine"),
    "gradient_norm": ("Gradient norm", "of the encoder", "L2 norm"),
    "row_norm": ("Row norm", "mean of the K active rows", "L2 norm"),
}
"""Key of a record to a chart's title, note and label."""


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    svg: str


def charts(records: list[Record], config: dict[str, Any]) -> list[Chart]:
    """The charts of the records of a metrics.jsonl, at least one."""
    chance = math.log(config["num_negatives"]) if config.get("num_negatives") else None
    made = [_loss(records, chance)]
    if any(record.get(ACCURACY_KEY) is not None for record in records):
        made.append(_accuracy(records))
    if _having(records, "learning_rate"):
        note = "of encoder, head and rows"
        made.append(_line(records, "learning_rate", "Learning rate", note, "learning rate"))
    if _having(records, "images_per_second"):
        note = "images per second, on all ranks together"
        made.append(_line(records, "images_per_second", "Throughput", note, "images / s"))
    made += [_line(records, key, *words) for key, words in _MONITORS.items() if _having(records, key)]
    stages = _having(records, *(f"{name}_seconds" for name in STAGES), "images_per_second", "seconds")
    if stages and config.get("batch_size"):
        made.append(_stages(stages, config["batch_size"]))
    return made


def _loss(records: list[Record], chance: float | None) -> Chart:
    def draw(axes: Axes) -> None:
        steps, losses = _curve(records, "loss")
        if len(losses) < FEWEST_TO_SMOOTH:
            axes.plot(steps, losses, color=_BLUE, linewidth=1.6, label="each record")
        else:
            axes.plot(steps, losses, color=_BLUE, linewidth=0.6, alpha=0.5, label="each record")
            axes.plot(steps, smoothed(losses.tolist()), color=_BLUE, linewidth=1.8, label="smoothed")
        if chance is not None:
            axes.axhline(chance, color=_ORANGE, linestyle="--", linewidth=1.2, label="chance, log K")
        axes.legend(frameon=False, labelcolor=_INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
        axes.set_ylabel("loss (nats)")

    return _chart("Loss", "cross entropy over the K active rows", draw)


def _accuracy(records: list[Record]) -> Chart:
    points = [record for record in records if record.get(ACCURACY_KEY) is not None]

    def draw(axes: Axes) -> None:
        axes.plot(*_curve(points, ACCURACY_KEY), color=_BLUE, marker="o", markersize=4)
        axes.set_ylabel("top-1 (%)")

    return _chart("kNN during training", "of training images among the others; labels are not used in training", draw)


def _line(records: list[Record], key: str, title: str, note: str, label: str) -> Chart:
    def draw(axes: Axes) -> None:
        axes.plot(*_curve(_having(records, key), key), color=_BLUE, linewidth=1.6)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))

    return _chart(title, note, draw)


def _stages(records: list[Record], batch_size: int) -> Chart:
    """Milliseconds per step, stacked by stage."""
    steps = np.array([record["step"] for record in records], float)
    num_steps = np.array([record["images_per_second"] * record["seconds"] / batch_size for record in records])
    parts = [
        _thin(1000 * np.array([record[f"{name}_seconds"] for record in records]) / np.maximum(num_steps, 1e-9))
        for name in STAGES
    ]

    def draw(axes: Axes) -> None:
        axes.stackplot(_thin(steps), parts, labels=STAGES, colors=list(_STAGE_COLOURS.values()), linewidth=0)
        axes.set_ylabel("ms per step")
        axes.set_ylim(bottom=0)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], labels[::-1], frameon=False, labelcolor=_INK, loc="center left", bbox_to_anchor=(1, 0.5)
        )

    return _chart("Time by stage", "of the slowest rank; rows: waiting for rows and moving them", draw)


def _having(records: list[Record], *keys: str) -> list[Record]:
    return [record for record in records if all(key in record for key in keys)]


def _curve(records: list[Record], key: str) -> tuple[Float64Array, Float64Array]:
    steps, values = (_thin(np.array([record[name] for record in records], float)) for name in ("step", key))
    return steps, values


def _thin(values: Float64Array) -> Float64Array:
    """Averages neighbours, so that at most _MAX_POINTS remain."""
    if len(values) <= _MAX_POINTS:
        return values
    return np.array([part.mean() for part in np.array_split(values, _MAX_POINTS)])


def _chart(title: str, note: str, draw: Callable[[Axes], None]) -> Chart:
    with _style():
        figure = Figure(figsize=(5.6, 2.9), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    svg = text[text.index("<svg") :].replace(_INK, "currentColor")
    return Chart(title, note, svg.replace("<svg ", f'<svg role="img" aria-label="{title} by step" ', 1))


@contextmanager
def _style() -> Iterator[None]:
    """Text as text, no background, and everything except the curves in the page's colour."""
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    options: Any = dict.fromkeys(ink, _INK) | {
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "font.family": "sans-serif",
        "font.size": 10,
        "savefig.transparent": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": "#808080",
        "grid.alpha": 0.25,
    }
    with mpl.rc_context(options):
        yield
