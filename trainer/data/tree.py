"""Walks the images of a folder, each real file once, and counts what it leaves out."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from trainer.data.decode import IMAGE_SUFFIXES
from weightserver.common.logs import Remark

_log = logging.getLogger(__name__)
_logged: set[str] = set()
"""Lines that this process has logged: it may list the same images several times."""


class Reason(Enum):
    """A reason why a file is no image of its source, for one file and for several."""

    LINKED = "link to what is listed anyway", "links to what is listed anyway"
    MISSING = "link to a missing file", "links to missing files"
    EMPTY = "empty file", "empty files"
    SPECIAL = "name that is no file", "names that are no files"
    SEPARATOR = "name with a tab or a line break", "names with a tab or a line break"


class LeftOut:
    """Files that a listing leaves out, counted by reason."""

    def __init__(self) -> None:
        self._counts: dict[Reason, int] = {}
        self._firsts: dict[Reason, str] = {}

    def add(self, reason: Reason, name: str) -> None:
        self._counts[reason] = self._counts.get(reason, 0) + 1
        self._firsts.setdefault(reason, name if name.isprintable() else repr(name))

    def line(self, source: Path) -> Remark:
        """One line with the count and the first name for each reason; empty if nothing is left out."""
        parts = [
            f"{count:,} {reason.value[count > 1]} ({'first ' * (count > 1)}{self._firsts[reason]})"
            for reason, count in self._counts.items()
        ]
        counts = {reason.name.lower(): count for reason, count in self._counts.items()}
        return Remark(f"left out of {source}: {', '.join(parts)}" if parts else "", left_out=counts)

    def log(self, source: Path) -> None:
        """Logs the line, once in the life of the process and on the first rank only."""
        line = self.line(source)
        if line and line not in _logged and int(os.environ.get("RANK", "0")) == 0:
            _logged.add(line)
            _log.warning("%(line)s", line.fields())


class Tree:
    """One walk over a folder of images.

    Links are followed, except to what the walk lists itself: folders and images in the walked folders that are not
    hidden. No folder is walked twice, so that memory grows with the number of folders, not of files.
    """

    def __init__(self, root: Path, left_out: LeftOut) -> None:
        self._root, self._left_out = root, left_out
        self._real_root = os.path.realpath(root)
        self._real_roots = {self._real_root}
        status = root.stat()
        self._walked = {(status.st_dev, status.st_ino)}

    def children(self) -> list[os.DirEntry[str]]:
        """What the folder contains, in order."""
        return in_order(self._root)

    def images(self, child: os.DirEntry[str]) -> Iterator[str]:
        """Paths of the images at and below `child`."""
        if not _is_folder(child):
            if is_image(child.name) and self._keeps_file(child):
                yield child.path
            return
        status = child.stat()
        here = (status.st_dev, status.st_ino)
        real = os.path.realpath(child.path) if child.is_symlink() else ""
        if here in self._walked or (real and self._walks(real)):
            self._leave_out(Reason.LINKED, child)
            return
        self._walked.add(here)
        if real:
            self._real_roots.add(real)
        for grandchild in in_order(child.path):
            yield from self.images(grandchild)

    def is_tar(self, child: os.DirEntry[str]) -> bool:
        """Whether a child of the folder itself is a tar to list."""
        if not child.name.endswith(".tar") or _is_folder(child) or not child.is_file():
            return False
        if child.is_symlink():
            real = os.path.realpath(child.path)
            if os.path.dirname(real) == self._real_root and real.endswith(".tar"):
                self._leave_out(Reason.LINKED, child)
                return False
        return True

    def _keeps_file(self, child: os.DirEntry[str]) -> bool:
        try:
            status = child.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            self._leave_out(Reason.MISSING, child)
            return False
        reason = None
        if not stat.S_ISREG(status.st_mode):
            reason = Reason.SPECIAL  # reading a pipe would wait for ever
        elif status.st_size == 0:
            reason = Reason.EMPTY
        elif child.is_symlink():
            real = os.path.realpath(child.path)
            reason = Reason.LINKED if is_image(real) and self._walks(real) else None
        if reason:
            self._leave_out(reason, child)
        return reason is None

    def _walks(self, real: str) -> bool:
        """Whether the walk comes to a real path by itself."""
        while real not in self._real_roots:
            above, name = os.path.split(real)
            if above == real or name.startswith("."):
                return False
            real = above
        return True

    def _leave_out(self, reason: Reason, child: os.DirEntry[str]) -> None:
        self._left_out.add(reason, os.path.relpath(child.path, self._root))


def is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def in_order(folder: str | Path) -> list[os.DirEntry[str]]:
    """What a folder contains, without hidden names, by the code points of the names."""
    with os.scandir(folder) as children:
        return sorted((child for child in children if not child.name.startswith(".")), key=lambda child: child.name)


def _is_folder(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link to itself
