"""Packing that ends where a file is written or appended to, as if it was killed there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.data import pack_parts
from weightserver.common.atomic_files import append_synced


class Killed(BaseException):
    """Ends the packing."""


def die_at(number: int, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the packing inside before, in the middle of, or after the `number`-th file that it writes or appends to.

    In the middle ("half"), half of the added data is there. A file is renamed as a whole, so "half" is before that.
    """
    replace, calls = Path.replace, 0

    def dying(act: Callable[[], object], half: Callable[[], object]) -> None:
        nonlocal calls
        calls += 1
        if calls == number and moment != "after":
            if moment == "half":
                half()
            raise Killed
        act()
        if calls == number:
            raise Killed

    def add(path: Path, content: bytes) -> None:
        dying(lambda: append_synced(path, content), lambda: append_synced(path, content[: len(content) // 2]))

    monkeypatch.setattr(Path, "replace", lambda path, target: dying(lambda: replace(path, target), lambda: None))
    monkeypatch.setattr(pack_parts, "append_synced", add)


def contents(directory: Path) -> dict[str, str]:
    """SHA-256 of each file by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}
