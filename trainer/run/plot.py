"""Draws a run's loss and accuracy during training as a PNG, from its metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

ACCURACY_KEY = "knn_top1"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, in order; a last line that a crash cut off is ignored.

    Raises:
        ValueError: the file is missing, or a line is not a JSON object.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}): give a run's metrics.jsonl") from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is not JSON: {error.msg}") from error
        if not isinstance(records[-1], dict):
            raise ValueError(f"{path}, line {number} is not a record: give a run's metrics.jsonl")
    return records


def draw_training(
    metrics: Path, output: Path, *, chance_loss: float | None = None, references: dict[str, float] | None = None
) -> None:
    """Draws loss by step (left axis) and kNN top-1 in percent (right axis) into the PNG `output`.

    `metrics` is a metrics.jsonl: records with "step" and "loss", some with "knn_top1". `chance_loss` (log K) and
    `references` (name to top-1, such as raw pixels) become dashed horizontal lines.
    """
    records = read_metrics(metrics)
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    accuracies = [(record["step"], record[ACCURACY_KEY]) for record in records if record.get(ACCURACY_KEY) is not None]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    loss_axes = figure.add_subplot()
    loss_axes.plot(*_columns(losses), color="tab:blue", linewidth=1, label="loss")
    if chance_loss is not None:
        loss_axes.axhline(chance_loss, color="tab:blue", linestyle="--", linewidth=0.8, label="loss by chance, log K")
    loss_axes.set_xlabel("step")
    loss_axes.set_ylabel("loss (nats)")
    accuracy_axes = loss_axes.twinx()
    accuracy_axes.plot(*_columns(accuracies), color="tab:orange", marker="o", label="kNN top-1 during training")
    for shade, (name, top1) in enumerate((references or {}).items()):
        accuracy_axes.axhline(top1, color=f"{0.3 + 0.2 * shade:.1f}", linestyle="--", linewidth=0.8, label=name)
    accuracy_axes.set_ylabel("top-1 (%)")
    handles = [*loss_axes.get_legend_handles_labels()[0], *accuracy_axes.get_legend_handles_labels()[0]]
    loss_axes.legend(handles=handles, loc="center right", fontsize="small")
    figure.savefig(output, dpi=150)


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
