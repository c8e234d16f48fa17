"""Shards whose disk fails at chosen writes and syncs of data.mdb, by a library that they load."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
META = 0
META_BYTES = 2 * 4096
"""The first pages of data.mdb, by which a commit counts."""


@dataclass(frozen=True)
class Call:
    """One write or sync of data.mdb."""

    name: str
    offset: int
    num_bytes: int
    error: int
    """What it failed with, or 0."""

    @property
    def is_meta(self) -> bool:
        return 0 <= self.offset < META_BYTES


class FailingDisk:
    """The disk of every shard that is started while this is `installed`; it fails at the next write of any shard."""

    def __init__(self, directory: Path) -> None:
        """Skips the test where there is no C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler (cc, gcc) to build the library that makes a disk fail")
        self._library = directory / "failing_disk.so"
        self._control = directory / "failing_disk"
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        self._times = itertools.count()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes effect in processes that start from now on."""
        monkeypatch.setenv("LD_PRELOAD", str(self._library))
        monkeypatch.setenv("FAILING_DISK", str(self._control))

    def fail(self, first: int, count: int, error: int, *, lands: bool = False) -> None:
        """`count` calls from number `first` of those from now on, from 1, or from the first of a meta page, `META`; the
        first of them is done nevertheless where it `lands`."""
        self._tell(f"{first} {count} {error} {int(lands)}")

    def watch(self) -> None:
        """Only records the calls from now on."""
        self._tell("1 0 0 0")

    def heal(self) -> None:
        self._control.unlink(missing_ok=True)

    def calls(self) -> list[Call]:
        """The calls since the last order to fail or to watch."""
        notes = self._control.with_suffix(".calls")
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [Call(name, *map(int, numbers)) for name, *numbers in map(str.split, lines)]

    def _tell(self, text: str) -> None:
        self.heal()
        self._control.with_suffix(".calls").unlink(missing_ok=True)
        partial = self._control.with_suffix(".new")
        partial.write_text(f"{text} {next(self._times)}\n")  # another text resets the count of calls
        partial.replace(self._control)
