"""The progress line of a run."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class TrainingProgress:
    """A progress line on stderr: images/s, loss and the loss by chance, learning rate, waits for data and rows, kNN."""

    def __init__(self, num_steps: int, *, chance: float, shown: bool = True) -> None:
        self._progress = Progress(
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._chance = chance
        self._knn = ""
        self._task = self._progress.add_task("", total=num_steps, text="")

    def update(self, record: dict[str, Any]) -> None:
        """Shows a record of metrics.jsonl."""
        if "knn_top1" in record:
            self._knn = f" kNN {record['knn_top1']:.1f} %"
        waits = f"{_share(record, 'data_seconds')} data {_share(record, 'row_wait_seconds')} rows"
        text = (  # 80 columns with share and time; a narrower terminal cuts off kNN
            f"{record['images_per_second']:,.0f} images/s loss {record['loss']:.2f} (chance {self._chance:.2f}) "
            f"lr {record['learning_rate']:.4f} wait {waits}{self._knn}"
        )
        self._progress.update(self._task, completed=record["step"] + 1, text=text)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


def _share(record: dict[str, Any], what: str) -> str:
    return f"{record[what] / record['seconds']:.0%}"
