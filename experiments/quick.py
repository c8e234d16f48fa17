"""Tables of tiny cells, which go the way of the real ones in minutes."""

from __future__ import annotations

from dataclasses import replace

from experiments.cells import Cell, Table
from trainer.config import TrainConfig

_IMAGES, _EPOCHS, _SEEDS = 2_560, 0.02, 2
"""Images, epochs as a fraction of the cell's, and the most seeds."""
_BATCH_SIZE = TrainConfig().batch_size
_ALL_IMAGES = 60_000
_SIZES = ("num_negatives", "window_size", "window_stride")


def quick(table: Table) -> Table:
    """The table with few images, steps and channels in each cell.

    The numbers of images, classes, windows and steps keep about their proportions.
    """
    return replace(table, cells=tuple(map(_quick, table.cells)), seeds=min(_SEEDS, table.seeds))


def _quick(cell: Cell) -> Cell:
    settings = dict(cell.settings)
    scale = _IMAGES / settings.get("num_images", _ALL_IMAGES)
    for name in _SIZES:
        if name in settings and not (name == "num_negatives" and "labels" in settings):
            settings[name] = max(1, round(scale * settings[name]))
    if "labels" not in settings:
        settings["num_negatives"] = max(_BATCH_SIZE, settings.get("num_negatives", 0))
    settings |= {
        "num_images": _IMAGES,
        "epochs": max(0.2, _EPOCHS * settings.get("epochs", 6.0)),
        "encoder": {"width": 8},
        "dim": 16,
    }
    evaluations = tuple(
        replace(evaluation, arguments=evaluation.arguments + evaluation.quick) for evaluation in cell.evaluations
    )
    return replace(cell, settings=settings, evaluations=evaluations, after=cell.after and _quick(cell.after))
