"""Tables of tiny cells, which go the way of the real ones in minutes."""

from __future__ import annotations

from dataclasses import replace

from experiments.cells import Cell, Table
from trainer.config import TrainConfig

_IMAGES, _EPOCHS, _SEEDS = 2_560, 0.02, 2
"""Images, epochs as a fraction of the cell's, and the most seeds."""
_BATCH_SIZE = TrainConfig().optimization.batch_size
_SIZES = ("num_negatives", "window_size", "window_stride")


def quick(table: Table) -> Table:
    """The table with few images, steps and channels in each cell.

    The numbers of images, windows and steps keep about their proportions.
    """
    return replace(table, cells=tuple(map(_quick, table.cells)), seeds=min(_SEEDS, table.seeds))


def _quick(cell: Cell) -> Cell:
    settings = dict(cell.settings)
    for name in _SIZES:
        if name in settings:
            settings[name] = max(1, round(_IMAGES / cell.num_images * settings[name]))
    settings |= {
        "num_images": _IMAGES,
        "num_negatives": max(_BATCH_SIZE, settings.get("num_negatives", 0)),
        "batch_size": _BATCH_SIZE,
        "epochs": max(0.2, _EPOCHS * settings.get("epochs", 6.0)),
        "encoder": {**settings.get("encoder", {}), "width": 8},
        "dim": 16,
    }
    evaluations = tuple(
        replace(evaluation, arguments=evaluation.arguments + evaluation.quick) for evaluation in cell.evaluations
    )
    return replace(cell, settings=settings, evaluations=evaluations)
