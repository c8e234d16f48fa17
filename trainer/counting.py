"""Progress of work that consists of many equal parts, such as images: a bar, how many are done, and the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch import Tensor

from trainer.display import duration, following

_SECONDS_SHOWN = 1.0
"""Numbers are read at most so often: that of a tensor waits for the GPU."""


class Counting:
    """What a display shows of such work.

    Args:
        what: what is being done.
        total: the number of parts; 0 while it is not known.
        done: those that were done before.
    """

    def __init__(self, what: str, total: int = 0, *, done: int = 0) -> None:
        self.what, self._done, self._total, self._before = what, done, total, done
        self._began = time.monotonic()
        self.numbers, self._read_at = "", -_SECONDS_SHOWN

    def advance(self, count: int = 1, **shown: Tensor) -> None:
        """`count` more parts are done; `shown` are numbers to show, such as loss=…."""
        self._done += count
        if shown and time.monotonic() > self._read_at + _SECONDS_SHOWN:
            self._read_at = time.monotonic()
            self.numbers = " ".join(f"{name} {value.item():.4g}" for name, value in shown.items())

    def update(self, done: int, total: int) -> None:
        """`done` of `total` parts are done."""
        if not self._total:
            self._began = time.monotonic()
        self._done, self._total = done, total

    def lines(self) -> Sequence[RenderableType]:
        if not self._total:
            return ()
        line = Table.grid(padding=(0, 1, 0, 0), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1, min_width=5)
        line.add_column(no_wrap=True)
        left = "" if self._seconds_left is None else f", {duration(self._seconds_left)} left"
        line.add_row(
            self.what,
            ProgressBar(total=self._total, completed=self._done),
            f"{self._done / self._total:.0%}, {self._done:,} of {self._total:,}{left}",
        )
        return (line, Text(self.numbers, no_wrap=True, overflow="ellipsis")) if self.numbers else (line,)

    def fields(self) -> dict[str, Any]:
        if not self._total:
            return {}
        fields = {"what": self.what, "done": self._done, "total": self._total}
        fields |= {"numbers": self.numbers} if self.numbers else {}
        return fields | ({} if self._seconds_left is None else {"seconds_left": round(self._seconds_left)})

    @property
    def _seconds_left(self) -> float | None:
        """None before the first part of those that are done here."""
        if self._done <= self._before:
            return None
        return (time.monotonic() - self._began) / (self._done - self._before) * (self._total - self._done)


@contextmanager
def counting(what: str, total: int = 0, *, done: int = 0) -> Iterator[Counting]:
    """Shows the progress until the context ends, if a display is open."""
    progress = Counting(what, total, done=done)
    with following(progress):
        yield progress
