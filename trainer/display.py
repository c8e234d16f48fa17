"""What the terminal shows while a command works: the stage that it is in, and the progress of its training.

On a terminal these are lines at its bottom, which disappear when the work ends; without one, lines of the log, at most
one a minute. Code anywhere names what it does by `stage`; it shows nothing unless a command opened a display.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from weightserver.common.logs import logs_json

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_REFRESHES_PER_SECOND = 2
_LOG_SECONDS = 60.0
"""Seconds between lines of the log where there is no terminal."""
_SECONDS_SHOWN = 1.0
"""Numbers are read at most so often: that of a tensor waits for the GPU."""


class Counting:
    """Progress of work that consists of many equal parts, such as images: a bar, how many are done, and the time left.

    Args:
        what: what is being done.
        total: the number of parts; 0 while it is not known.
        done: those that were done before.
    """

    def __init__(self, what: str, total: int = 0, *, done: int = 0) -> None:
        self.what, self._done, self._total, self._before = what, done, total, done
        self._began, self._is_updated = time.monotonic(), False
        self.numbers, self._read_at = "", -_SECONDS_SHOWN

    def advance(self, count: int = 1, **shown: Tensor) -> None:
        """`count` more parts are done; `shown` are numbers to show, such as loss=…."""
        self._done += count
        if shown and time.monotonic() > self._read_at + _SECONDS_SHOWN:
            self._read_at = time.monotonic()
            self.numbers = " ".join(f"{name} {value.item():.4g}" for name, value in shown.items())

    def update(self, done: int, total: int) -> None:
        """`done` of `total` parts are done. What came before the first call is of none of them."""
        if not self._is_updated:
            self._began, self._before, self._is_updated = time.monotonic(), done, True
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


class _Display:
    """What is being done. Threads may change it at any time: it is drawn by a thread of its own."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float]] = []
        self.progress: Counting | None = None
        self.notice = ""
        self.is_open = self.is_drawn = False
        self._spinner = Spinner("dots")

    def __rich__(self) -> RenderableType:
        progress = self.progress
        lines = [] if progress is None else list(progress.lines())
        if doing := self._doing():
            text = Text(doing, no_wrap=True, overflow="ellipsis")
            self._spinner.update(text=text)
            lines.append(self._spinner)
        return Group(*lines)

    def log_line(self) -> None:
        """Logs what is being done."""
        fields = {} if self.progress is None else self.progress.fields()
        if doing := self._doing():
            fields["doing"] = doing
        if fields:
            _log.info("progress", extra=fields)

    def _doing(self) -> str:
        stage = ""
        if stages := self.stages[-1:]:
            ((name, since),) = stages
            stage = f"{name}, {duration(time.monotonic() - since)}"
        return ": ".join(filter(None, (self.notice, stage)))


_display = _Display()


@contextmanager
def shown(*, wanted: bool = True) -> Iterator[None]:
    """Shows the stages inside on stderr, on the first rank only; one inside another adds nothing.

    Args:
        wanted: whether a terminal shows them. Otherwise the log has a line a minute, as it has without a terminal, if
            the log is JSON, and if several ranks share the terminal, whose messages lines that are redrawn would erase.
    """
    if _display.is_open or int(os.environ.get("RANK", "0")) > 0:
        yield
        return
    console = Console(stderr=True)
    is_shared = int(os.environ.get("WORLD_SIZE", "1")) > 1
    _display.is_open = True
    _display.is_drawn = wanted and console.is_terminal and not is_shared and not logs_json()
    try:
        with _drawn(console) if _display.is_drawn else _logged():
            yield
    finally:
        _display.is_open = _display.is_drawn = False


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Names what the code inside does, for a display; a stage inside another one takes its place until it ends."""
    entry = (name, time.monotonic())
    _display.stages.append(entry)
    try:
        yield
    finally:
        _display.stages.remove(entry)


@contextmanager
def counting(what: str, total: int = 0, *, done: int = 0) -> Iterator[Counting]:
    """Shows the progress until the context ends, in place of any other, if a display is open."""
    progress = Counting(what, total, done=done)
    before, _display.progress = _display.progress, progress
    try:
        yield progress
    finally:
        _display.progress, _display.notice = before, ""


def notify(notice: str) -> bool:
    """Shows a notice until the progress ends; whether a terminal shows it. Safe in a signal handler."""
    _display.notice = notice
    return _display.is_drawn


def duration(seconds: float) -> str:
    """A duration in hours, minutes and seconds: 0:12:34."""
    return str(timedelta(seconds=round(seconds)))


def _drawn(console: Console) -> Live:
    """Draws the display on the terminal while the context lasts."""
    return Live(
        _display,
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # a file that stdout is redirected to still gets what is printed
    )


@contextmanager
def _logged() -> Iterator[None]:
    """Logs the display once a minute while the context lasts."""
    ended = threading.Event()

    def log() -> None:
        while not ended.wait(_LOG_SECONDS):
            _display.log_line()

    thread = threading.Thread(target=log, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
