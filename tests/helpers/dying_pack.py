"""Packing that ends where a file is written or appended to, as if it was killed there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.data import pack_parts
from trainer.data.pack_parts import LOCK, PLANNING
from weightserver.common.atomic_files import append_synced, sha256


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
    """SHA-256 of each file of a pack, and of its test images, by its path there."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name not in (LOCK, PLANNING))
    return {str(path.relative_to(directory)): sha256(path) for path in found}
