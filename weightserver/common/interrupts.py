"""How every command says that a signal ended it, also while it is still being imported: one line, no traceback."""

from __future__ import annotations

import sys
from types import TracebackType


def interruption(when: str = "", hint: str = "") -> str:
    """The words about it: "interrupted", `when`, and what the user can do."""
    return " ".join(filter(None, ("interrupted", when))) + (f": {hint}" if hint else "")


def end_quietly() -> None:
    """Replaces the traceback of an uncaught Ctrl-C by one line.

    The interpreter then ends by SIGINT as usual, so that shells see it.
    """
    sys.excepthook = _without_traceback


def _without_traceback(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(interruption(), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
