"""Logs one line per event, as text or JSON, with fields.

Everything logs through the standard library; fields are the `extra` of the call, or the names in its sentence:

    _log.info("checkpoint taken", extra={"name": name})
    _log.warning("%(directory)s is full", {"directory": path})

A JSON line has the values of the sentence as fields too.

A request's id, which its client draws, appears in the lines of both sides. Rows and tokens are never fields.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
REQUEST_ID = "x-request-id"
"""Key of the id in a call's metadata."""
_ID = re.compile(r"[0-9A-Za-z-]{1,64}")

_request: ContextVar[str | None] = ContextVar("request", default=None)


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress line may replace; ignores errors if stderr is closed."""

    as_json = False

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


class _Lines(logging.Formatter):
    """Makes a line of an event: its time, level and sentence, `fields`, the request's id and its own fields."""

    def __init__(self, log_format: LogFormat, fields: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._as_json = log_format == "json"
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        request = _request.get()
        fields = self._fields() | ({} if request is None else {"request": request})
        extra = vars(record).keys() - _STANDARD
        fields |= {name: vars(record)[name] for name in extra if not name.startswith("_")}  # Ray's begin so
        time = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        level, event = record.levelname.lower(), record.getMessage()
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            named = record.args if isinstance(record.args, dict) else {}
            fields |= {"exception": traceback} if traceback else {}
            return json.dumps({**named, **fields, "event": event, "level": level, "timestamp": time}, default=repr)
        line = [f"{time} [{level}] {_in_a_line(event)}"]
        line += [f"{name}={_in_a_line(str(value))}" for name, value in sorted(fields.items())]
        return " ".join(line) + (f"\n{traceback}" if traceback else "")


_STANDARD = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}
"""What every record has."""


def _in_a_line(text: str) -> str:
    """Text without what would control a terminal or begin a line."""
    return printable(text).replace("\n", r"\n")


def printable(text: str) -> str:
    """Lines, with what would control a terminal escaped: names of files and answers of other programs may have that."""
    return "\n".join(line if line.isprintable() else repr(line)[1:-1] for line in text.split("\n"))


class OncePerSecond:
    """Allows one line of each kind a second, of any thread: what happens often is counted by metrics."""

    def __init__(self) -> None:
        self._last: dict[Hashable, float] = {}

    def __call__(self, kind: Hashable) -> bool:
        now = time.monotonic()
        if now - self._last.get(kind, -math.inf) < 1.0:
            return False
        self._last[kind] = now
        return True


def new_request_id() -> str:
    return secrets.token_hex(8)


def follow_request(metadata: Iterable[tuple[str, Any]]) -> None:
    """Adds the id in a call's metadata to all lines of its context; ignores an invalid id."""
    for key, value in metadata:
        if key == REQUEST_ID and _ID.fullmatch(value):
            _request.set(value)


def log_events(log_format: LogFormat, fields: Callable[[], dict[str, Any]] = dict) -> None:
    """Makes this process log to stderr from level info, with `fields` in every line; replaces any earlier set-up.

    Stdout escapes from now on what its encoding lacks, such as file names that are not UTF-8, as stderr always does.
    """
    if sys.stderr is None:  # it was closed; print() would take stdout for it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = _Stderr()
    handler.as_json = log_format == "json"
    handler.setFormatter(_Lines(log_format, fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    if handler.as_json:
        logging.captureWarnings(True)
        sys.excepthook, threading.excepthook = _log_uncaught, _log_uncaught_in_thread


def asked_format(arguments: Sequence[str]) -> LogFormat:
    """The format that --log-format asks for, before the arguments are parsed: their errors are logged too."""
    asked = any(pair == ("--log-format", "json") for pair in itertools.pairwise(arguments))
    return "json" if asked or "--log-format=json" in arguments else "text"


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("uncaught error", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None:
        _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)


def logs_json() -> bool:
    return any(isinstance(handler, _Stderr) and handler.as_json for handler in logging.getLogger().handlers)


class Remark(str):
    """A sentence for the user, with the values in it for the log: `_log.warning("%(line)s", remark.fields())`."""

    __slots__ = ("values",)
    values: dict[str, Any]

    def __new__(cls, sentence: str, **values: Any) -> Remark:
        made = super().__new__(cls, sentence)
        made.values = values
        return made

    def fields(self) -> dict[str, Any]:
        return self.values | {"line": str(self)}


def say(remark: Remark, level: int = logging.INFO) -> None:
    """Prints a remark on stderr, or logs it if the log is JSON."""
    if logs_json():
        logging.getLogger(__name__).log(level, "%(line)s", remark.fields())
    else:
        print(printable(remark), file=sys.stderr, flush=True)


def print_error(line: str) -> None:
    """Prints why the process ends on stderr: one line, or one event if the log is JSON. Ignores its errors."""
    if logs_json():
        logging.getLogger(__name__).error(line)
    else:
        with contextlib.suppress(OSError, ValueError):
            print(printable(line), file=sys.stderr, flush=True)
