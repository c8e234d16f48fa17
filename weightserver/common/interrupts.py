"""How every command says that a signal ended it."""

from __future__ import annotations


def interruption(when: str = "", hint: str = "") -> str:
    """The words about it: "interrupted", `when`, and what the user can do."""
    return " ".join(filter(None, ("interrupted", when))) + (f": {hint}" if hint else "")
