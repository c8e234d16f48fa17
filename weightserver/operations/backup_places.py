"""Where backups are: each a folder beside others."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weightserver.common.atomic_files import PRIVATE_DIRECTORY, PRIVATE_FILE, atomic_directory, atomic_write

MANIFEST = "manifest.json"
"""The file that a complete backup has."""
Write = Callable[[str, bytes], None]
"""Writes a file of a new backup, by its path in it and its content."""


@dataclass(frozen=True)
class Folder:
    """A folder for one backup."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def beside(self, name: str) -> Folder:
        """The place of that name beside this one."""
        return Folder(self.path.resolve().parent / name)

    def complete(self) -> list[str]:
        """Names of the complete backups in the folder of this one, in any order."""
        return [manifest.parent.name for manifest in self.path.resolve().parent.glob(f"*/{MANIFEST}")]

    def read(self, file: str) -> bytes:
        """A file of the backup. Raises OSError, FileNotFoundError among them."""
        return (self.path / file).read_bytes()

    @contextlib.contextmanager
    def new(self) -> Iterator[Write]:
        """Yields what writes the files of a new backup, from any thread. All appear on success, none on failure.

        Raises:
            ValueError: the folder holds something.
            OSError: the disk is full, or another process writes to the folder.
        """
        with atomic_directory(self.path, mode=PRIVATE_DIRECTORY) as new:

            def write(file: str, content: bytes) -> None:
                path = new / file
                path.parent.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
                atomic_write(path, lambda partial: partial.write_bytes(content), mode=PRIVATE_FILE)

            yield write

    def remove(self) -> None:
        """Removes the backup; one that is removed in part is none any more."""
        (self.path / MANIFEST).unlink()
        shutil.rmtree(self.path)
