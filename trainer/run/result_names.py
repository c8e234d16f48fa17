"""Names and units of a run's results, for readers: summary.json has short names, seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.run.directory import number


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.2f} %"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _memory(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


_NAMES: dict[str, tuple[str, Callable[[float], str]]] = {
    "knn_top1": ("accuracy of kNN, top-1", _percent),
    "linear_top1": ("accuracy of the linear probe, top-1", _percent),
    "mean_loss": ("loss at the end, mean of the last tenth of the run", lambda value: f"{value:.4g}"),
    "loss": ("loss of the last step", lambda value: f"{value:.4g}"),
    "epochs": ("visits to each image", lambda value: f"{value:.4g}"),
    "steps": ("steps", _count),
    "parts": ("times the run was started or resumed", _count),
    "train_seconds": ("time of training", _duration),
    "seconds": ("time with evaluation", _duration),
    "peak_memory_bytes": ("peak memory", _memory),
    "fetched_rows": ("rows fetched from the weight servers", _count),
    "pushed_rows": ("rows written to the weight servers", _count),
    "corrected_rows": ("rows corrected when they came back", _count),
    "missed_steps": ("steps that these rows had missed, together", _count),
    "largest_gap": ("most steps that a row had missed", _count),
}


def in_words(results: Mapping[str, Any]) -> dict[str, str]:
    """Results by a name in words, with units, those that matter most first; others by the name that they have. What is
    no number is left out: warnings and proportions."""
    known = {title: show(results[name]) for name, (title, show) in _NAMES.items() if name in results}
    others = {
        name: number(value) for name, value in results.items() if name not in _NAMES and isinstance(value, int | float)
    }
    return known | others
