"""What the bring-up prints, checks and waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from deploy.bring_up.settings import ROOT

Found = TypeVar("Found")


class UnexpectedBehaviour(Exception):
    """Something behaves differently from docs/deployment.md."""


def check(condition: object, otherwise: str) -> None:
    """Raises UnexpectedBehaviour unless the condition is true."""
    if not condition:
        raise UnexpectedBehaviour(otherwise)


_hidden: dict[str, str] = {str(ROOT): "."}
"""Paths of this machine, and what replaces them in the output."""
_started = time.monotonic()


def hide(path: str, name: str) -> None:
    """Prints `name` in place of `path` from now on."""
    _hidden[path] = name


def say(text: str) -> None:
    for path, name in _hidden.items():
        text = text.replace(path, name)
    print(text, flush=True)


def title(text: str) -> None:
    say(f"\n== {text} ({time.monotonic() - _started:.0f} s)")


def wait_until(condition: Callable[[], Found], what: str, *, seconds: float = 120) -> Found:
    """Waits until `condition` returns something true, and returns that."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        check(time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)
    return found
