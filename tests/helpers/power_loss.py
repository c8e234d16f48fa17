"""Files of this process that a power loss would keep: the synced ones, in the directories that it has synced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BY_LMDB = ("data.mdb", "lock.mdb")
"""Files whose contents LMDB syncs or that hold no data; test_failing_disk.py checks those of data.mdb."""


class PowerLoss:
    """Records what is synced, and asserts that each renamed file was synced before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._entries: dict[int, dict[str, int]] = {}  # of a directory's inode: the inode of each name
        self._contents: dict[int, bytes] = {}
        fsync = os.fsync

        def noting(descriptor: int) -> None:
            fsync(descriptor)
            self._note(descriptor)

        monkeypatch.setattr(os, "fsync", noting)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._checking(getattr(os, name)))

    def lost(self, root: Path, *, but: tuple[str, ...] = BY_LMDB) -> set[str]:
        """Paths below `root` that would be missing or incomplete; files named `but` count only if missing."""
        return set(self._lost(root, root, but))

    def _lost(self, root: Path, directory: Path, but: tuple[str, ...]) -> Iterator[str]:
        noted = self._entries.get(directory.stat().st_ino, {})
        for path in directory.iterdir():
            inode = path.lstat().st_ino
            if noted.get(path.name) != inode:
                yield str(path.relative_to(root))
            elif path.is_dir():
                yield from self._lost(root, path, but)
            elif path.name not in but and self._contents.get(inode) != path.read_bytes():
                yield str(path.relative_to(root))

    def _note(self, descriptor: int) -> None:
        path, inode = Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor).st_ino
        if path.is_dir():
            self._entries[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._contents[inode] = path.read_bytes()

    def _checking(self, rename: Any) -> Any:
        def checked(source: Path, target: Path, **options: Any) -> None:
            path = Path(source)
            if path.is_file() and path.name not in BY_LMDB:
                synced = self._contents.get(path.stat().st_ino) == path.read_bytes()
                assert synced, f"{source} takes the place of {target} before it is synced"
            rename(source, target, **options)

        return checked
