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
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from weightserver.common.logs import logs_json

_log = logging.getLogger(__name__)

_REFRESHES_PER_SECOND = 2
_LOG_SECONDS = 60.0
"""Seconds between lines of the log where there is no terminal."""


class Progress(Protocol):
    """Progress that a display shows above the current stage."""

    def lines(self) -> Sequence[RenderableType]: ...

    def fields(self) -> dict[str, Any]:
        """The same as fields of a log line."""


class _Display:
    """What is being done. Threads may change it at any time: it is drawn by a thread of its own."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float]] = []
        self.progress: Progress | None = None
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
def following(progress: Progress) -> Iterator[None]:
    """Shows the progress until the context ends, in place of any other."""
    before, _display.progress = _display.progress, progress
    try:
        yield
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
