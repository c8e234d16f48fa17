"""Logs one line per event, as text or JSON, with fields.

Everything logs through the standard library; fields are the `extra` of the call:

    _log.info("checkpoint taken", extra={"name": name})

A request's id, which its client draws, appears in the lines of both sides. Rows and tokens are never fields.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Literal

import structlog

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


def _printable(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Escapes text that would control a terminal."""
    return {
        key: repr(value)[1:-1] if isinstance(value, str) and not value.isprintable() and key != "exception" else value
        for key, value in event.items()
    }


def new_request_id() -> str:
    return secrets.token_hex(8)


def follow_request(metadata: Iterable[tuple[str, Any]]) -> None:
    """Adds the id in a call's metadata to all lines of its context; ignores an invalid id."""
    for key, value in metadata:
        if key == REQUEST_ID and _ID.fullmatch(value):
            _request.set(value)


def log_events(log_format: LogFormat, fields: Callable[[], dict[str, Any]] = dict) -> None:
    """Makes this process log to stderr from level info, with `fields` in every line; replaces any earlier set-up."""

    def common(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        request = _request.get()
        return {**fields(), **({} if request is None else {"request": request}), **event}

    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
        common,
    ]
    if log_format == "json":
        render: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback  # the default shows local variables, which may include the token
        render = [
            _printable,
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, pad_level=False, exception_formatter=plain),
        ]
    handler = _Stderr()
    handler.as_json = log_format == "json"
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def print_error(line: str) -> None:
    """Prints why the process ends on stderr: one line, or one event if the log is JSON."""
    if any(isinstance(handler, _Stderr) and handler.as_json for handler in logging.getLogger().handlers):
        logging.getLogger(__name__).error(line)
    else:
        print(line, file=sys.stderr)
