"""Draws a run's loss and accuracy during training, from its metrics.jsonl."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.run.directory import read_metrics

_ACCURACY = "knn_top1"
_INITIAL_ACCURACY = "initial_knn_top1"
"""The first record's kNN top-1 of the encoder before its first update."""
_FEWEST_TO_SMOOTH = 100
"""A loss of fewer records is drawn as it is: a smoothed one would hide it."""
_DASHES = ((6, 2), (2, 2), (8, 2, 2, 2))
"""Lengths of dashes and gaps of the reference lines."""


def draw_training(
    metrics: Path,
    *,
    chance_loss: float | None = None,
    references: Mapping[str, float] | None = None,
    others: Mapping[str, Path] | None = None,
) -> bytes:
    """Draws loss and kNN top-1 in percent by step, as a PNG.

    `metrics` is a metrics.jsonl: records with "step" and "loss", some with "knn_top1". `chance_loss` and `references`
    (label to top-1 at the end, such as that of raw pixels) become horizontal lines. `others` are the metrics.jsonl of
    further runs to draw beside this one, by name. Accuracy that no record has gets no panel. Every line has dashes or
    marks of its own, so that colour is not needed to tell them apart; the legends stand above the panels.
    """
    records = _records(metrics)
    runs = {name: _records(path) for name, path in (others or {}).items()}
    with_accuracy = bool(references) or any(_ACCURACY in record for record in records)
    number = 2 if with_accuracy else 1
    figure = Figure(figsize=(8, 1 + 3 * number), layout="constrained")
    panels = figure.subplots(number, 1, sharex=True, squeeze=False)[:, 0]
    _draw_loss(panels[0], records, runs, chance_loss)
    if with_accuracy:
        _draw_accuracy(panels[1], records, runs, references or {})
    axes = panels[-1]
    axes.set_xlim(left=0)
    axes.set_xlabel("step")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _records(metrics: Path) -> list[dict[str, Any]]:
    """The records with a loss, and what is drawn of each: there may be millions."""
    drawn = ("step", "loss", _ACCURACY, _INITIAL_ACCURACY)
    return [
        {key: record[key] for key in drawn if key in record} for record in read_metrics(metrics) if "loss" in record
    ]


def _draw_loss(
    axes: Axes, records: list[dict[str, Any]], others: dict[str, list[dict[str, Any]]], chance: float | None
) -> None:
    steps, losses = _columns([(record["step"], record["loss"]) for record in records])
    if len(losses) < _FEWEST_TO_SMOOTH:
        axes.plot(steps, losses, color="tab:blue", linewidth=1.6, label="loss")
    else:
        axes.plot(steps, losses, color="tab:blue", linewidth=0.6, alpha=0.5, label="loss")
        axes.plot(steps, _smoothed(losses), color="tab:blue", linewidth=2, label="loss, smoothed")
    for (name, found), dashes in zip(others.items(), itertools.cycle(_DASHES)):
        steps, losses = _columns([(record["step"], record["loss"]) for record in found])
        axes.plot(steps, _smoothed(losses), color="tab:red", linestyle=(0, dashes), linewidth=2, label=name)
    if chance is not None:
        axes.axhline(chance, color="tab:blue", linestyle=":", linewidth=1.2, label="loss by chance")
    axes.set_ylabel("loss (nats)")
    _legend_above(axes)


def _draw_accuracy(
    axes: Axes,
    records: list[dict[str, Any]],
    others: dict[str, list[dict[str, Any]]],
    references: Mapping[str, float],
) -> None:
    if points := _accuracies(records):
        axes.plot(*_columns(points), color="tab:orange", linestyle="-", marker="o", label="during training")
    for (name, found), marker in zip(others.items(), itertools.cycle("svd^")):
        if points := _accuracies(found):
            axes.plot(*_columns(points), color="tab:red", linestyle="--", marker=marker, fillstyle="none", label=name)
    for (name, top1), dashes in zip(references.items(), itertools.cycle(_DASHES)):
        axes.axhline(top1, color="0.35", linestyle=(0, dashes), linewidth=1.2, label=name)
    axes.set_ylabel("kNN top-1 (%)")
    _legend_above(axes)


def _accuracies(records: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Steps and kNN top-1 of training images, from before the first step on where that was measured."""
    before = [(0.0, record[_INITIAL_ACCURACY]) for record in records if _INITIAL_ACCURACY in record]
    return before + [(record["step"], record[_ACCURACY]) for record in records if record.get(_ACCURACY) is not None]


def _legend_above(axes: Axes) -> None:
    """A legend between this panel and the one above it, where it covers no curve."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        fontsize="small",
        frameon=False,
        handlelength=3,
        columnspacing=1.2,
    )


def _smoothed(values: Sequence[float]) -> list[float]:
    """The mean of the twentieth of all values around each one.

    At the start it covers equally many on both sides, so that a curve begins at its first value; the end has fewer.
    """
    reach = len(values) // 40
    sums = [0.0, *itertools.accumulate(values)]
    bounds = ((max(0, i - reach), min(len(values), i + min(i, reach) + 1)) for i in range(len(values)))
    return [(sums[last] - sums[first]) / (last - first) for first, last in bounds]


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
