"""Says in one line what a parser refuses, which by itself draws a box."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import TypeVar

from weightserver.common.logs import logs_json, print_error

Parsed = TypeVar("Parsed")
Parse = Callable[[list[str]], Parsed]
"""Parses options; raises SystemExit if it refuses one."""


class RefusedError(ValueError):
    """What a parser says about the options that it refuses, in one line."""


def parsed(parse: Parse[Parsed], arguments: Sequence[str]) -> Parsed:
    """Parses; raises RefusedError where the parser would print a box and end the process."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return parse(list(arguments))
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
    inside = [line.strip(" │─") for line in box.getvalue().splitlines() if line[:1] not in ("╭", "╰")]
    raise RefusedError(" ".join(" ".join(inside).partition("For full helptext")[0].split()))


def parsed_or_exit(parse: Parse[Parsed], arguments: Sequence[str], *, command: str) -> Parsed:
    """Parses; ends the process for refused options. If the log is JSON, an event says which, instead of a box."""
    if not logs_json():
        return parse(list(arguments))
    try:
        return parsed(parse, arguments)
    except RefusedError as error:
        print_error(f"{command}: {error}")
        sys.exit(2)
