"""Settings and cells that several tables share: the paper's, with equal dimensionless numbers, for 10,000 images."""

from __future__ import annotations

from typing import Any

from experiments.cells import LINEAR, Cell, Evaluation

IMAGES = 10_000
EPOCHS = 40.0
"""For the paper's 200 epochs."""
BASE: dict[str, Any] = {"num_images": IMAGES, "epochs": EPOCHS, "weight_decay": 3e-3, "num_negatives": 512}
EPOCH_ORDER: dict[str, Any] = {"window_size": IMAGES, "window_stride": IMAGES}
WINDOW: dict[str, Any] = {"window_size": 1_024, "window_stride": 128}

ONE_PERCENT, TEN_PERCENT = (
    Evaluation(
        name=f"labels-{percent}",
        arguments=("semi-supervised", "--labels", str(percent / 100), "--batch-size", "32", "--epochs", str(epochs)),
        quick=("--epochs", "1", "--learning-rates", "0.01"),
        all_images=True,
    )
    for percent, epochs in ((1, 30), (10, 20))
)
"""In 540 and 3,740 updates, as in the paper's 500 and 10,000; its batches and epochs would be 20 and 460 here."""
SUPERVISED: dict[str, Any] = BASE | EPOCH_ORDER | {"labels": "classes", "num_negatives": 10}
"""Classification by the ten labels, with this trainer."""


def in_epoch_order(row: str, column: str = "", **settings: Any) -> Cell:
    """A cell of the base settings in epoch order, with changes."""
    return Cell(row=row, column=column, settings=BASE | EPOCH_ORDER | settings)


def in_windows(row: str, column: str = "", **settings: Any) -> Cell:
    """A cell of the base settings with the sliding window, with changes."""
    return Cell(row=row, column=column, settings=BASE | WINDOW | settings)


def papers(numbers: dict[str, float]) -> dict[str, dict[str, float]]:
    """The paper's linear evaluation, top-1, by cell's name."""
    return {name: {LINEAR: number} for name, number in numbers.items()}
