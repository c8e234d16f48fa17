"""The progress of a training: a bar, step and epoch, time left, loss and images a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.display import duration

_WINDOW_SECONDS = 60.0
"""The speed is that of the steps in the last minute."""
_POINT_SECONDS = 0.5
_SLOW_SECONDS = 2.0
"""A step that takes longer than this is named."""
_ACTIVITIES = {
    "data": "waiting for images",
    "rows": "waiting for rows",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "update",
}


class TrainingProgress:
    """What a display shows of a training. Speed and time left are measured on the steps, without pauses.

    Args:
        start_step: the first step of this part of the run.
        stage: returns the stage of the current step.
        clock: returns the seconds since any moment.
    """

    def __init__(
        self,
        *,
        start_step: int,
        num_steps: int,
        batch_size: int,
        num_images: int,
        chance: float,
        stage: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_step = self._done = start_step
        self._num_steps = num_steps
        self._batch_size = batch_size
        self._steps_in_epoch = num_images / batch_size
        self._chance = chance
        self._stage = stage
        self._clock = clock
        self._began = self._advanced = clock()
        self._seconds = 0.0
        self._points = deque([(start_step, 0.0)])
        self._record: dict[str, Any] = {}

    def advance(self, done: int, seconds: float) -> None:
        """The run has done `done` updates, those of this part in `seconds` without pauses."""
        self._done, self._seconds, self._advanced = done, seconds, self._clock()
        if seconds - self._points[-1][1] >= _POINT_SECONDS:
            self._points.append((done, seconds))
            while len(self._points) > 2 and self._points[1][1] < seconds - _WINDOW_SECONDS:
                self._points.popleft()

    def update(self, record: dict[str, Any]) -> None:
        """Shows a record of metrics.jsonl."""
        self._record = self._record | record

    @property
    def steps_per_second(self) -> float:
        """Speed in the last minute; 0 before the first step."""
        first, since = self._points[0]
        return (self._done - first) / max(self._seconds - since, 1e-9) if self._done > first else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time of the remaining steps and their share of pauses, such as evaluations; None before the first step."""
        remaining, here = self._num_steps - self._done, self._done - self._start_step
        if not here:
            return None
        paused = max(0.0, self._advanced - self._began - self._seconds)
        return remaining / self.steps_per_second + remaining * paused / here

    def lines(self) -> Sequence[RenderableType]:
        line = Table.grid(padding=(0, 1, 0, 0), expand=True)
        line.add_column(ratio=1, min_width=5)
        line.add_column(no_wrap=True)
        left = "" if self.seconds_left is None else f", {duration(self.seconds_left)} left"
        line.add_row(
            ProgressBar(total=self._num_steps, completed=self._done),
            f"{self._done / self._num_steps:.0%} step {self._done:,} of {self._num_steps:,}, "
            f"epoch {self._epoch:.4g} of {self._num_steps / self._steps_in_epoch:.4g}{left}",
        )
        return line, Text(", ".join(self._numbers()), no_wrap=True, overflow="ellipsis")

    def _numbers(self) -> list[str]:
        """What fits the second line, the most important first."""
        record = self._record
        loss = f"{record['loss']:.2f}" if record else "-"
        speed = f"{self._images_per_second:,.0f}" if self._done > self._start_step else "-"
        numbers = [f"loss {loss} (chance {self._chance:.2f})", f"{speed} images/s"]
        if "knn_top1" in record:
            numbers.append(f"kNN {record['knn_top1']:.1f} %")
        if record:
            data, rows = (f"{record[name] / record['seconds']:.0%}" for name in ("data_seconds", "row_wait_seconds"))
            numbers.append(f"wait {data} data {rows} rows")
        return numbers

    def fields(self) -> dict[str, Any]:
        left = self.seconds_left
        fields = {"step": self._done, "num_steps": self._num_steps, "epoch": round(self._epoch, 3)}
        fields |= {name: self._record[name] for name in ("loss", "knn_top1") if name in self._record}
        fields |= {"images_per_second": round(self._images_per_second)}
        return fields | ({} if left is None else {"seconds_left": round(left)})

    def activity(self) -> str:
        waited = self._clock() - self._advanced
        if waited < _SLOW_SECONDS or self._done == self._num_steps:
            return ""
        doing = _ACTIVITIES.get(self._stage(), "working")
        return f"step {self._done + 1:,}: {doing}, {duration(waited)}"

    @property
    def _epoch(self) -> float:
        return self._done / self._steps_in_epoch

    @property
    def _images_per_second(self) -> float:
        return self.steps_per_second * self._batch_size
