"""Says in one line what tyro refuses, which by itself draws a box."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import TypeVar

from weightserver.common.logs import print_error

Parsed = TypeVar("Parsed")


def parsed_or_exit(parse: Callable[[list[str]], Parsed], arguments: Sequence[str], *, command: str) -> Parsed:
    """Parses; ends the process with one line and status 2 for options that `parse` refuses."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return parse(list(arguments))
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
    inside = [line.strip(" │─") for line in box.getvalue().splitlines() if line[:1] not in ("╭", "╰")]
    print_error(f"{command}: {' '.join(' '.join(inside).partition('For full helptext')[0].split())}")
    sys.exit(2)
