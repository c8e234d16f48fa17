"""Packing that ends where a file is renamed into place, as if it was killed there."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from trainer.data.manifest import LOCK
from trainer.data.planning import PLANNING
from weightserver.common.atomic_files import sha256


class Killed(BaseException):
    """Ends the packing."""


def die_at(number: int, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the packing before or after the `number`-th file that it renames into place."""
    replace, calls = Path.replace, itertools.count(1)

    def dying(path: Path, target: Path) -> Path:
        call = next(calls)
        if call == number and moment == "before":
            raise Killed
        found = replace(path, target)
        if call == number:
            raise Killed
        return found

    monkeypatch.setattr(Path, "replace", dying)


def contents(directory: Path) -> dict[str, str]:
    """SHA-256 of each file of a pack, and of its test images, by its path there."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name not in (LOCK, PLANNING))
    return {str(path.relative_to(directory)): sha256(path) for path in found}
