"""Files that a source leaves out, counted by reason, so that every file that was found is accounted for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Set
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from trainer.data.decode import IMAGE_SUFFIXES, is_picture
from weightserver.common.logs import Remark
from weightserver.common.object_store import shown

_log = logging.getLogger(__name__)
_logged: set[str] = set()
"""Lines that this process has logged: it may read the same source several times."""
_TEXTS = frozenset(
    (".txt", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".md", ".html", ".yaml", ".yml", ".log", ".py", ".cls")
)
"""Suffixes of texts, of which there may be one for each image."""
_MOST_QUOTED = 100
_HEIC = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
"""Brands of the format, after "ftyp". Source: ISO/IEC 23008-12."""


class Reason(Enum):
    """A reason why a file is no image of its source, for one file and for several."""

    LINKED = "link to what lies in the source", "links to what lies in the source"
    MISSING = "link to a missing file", "links to missing files"
    EMPTY = "empty file", "empty files"
    SPECIAL = "name that is no file", "names that are no files"
    DAMAGED = "file that cannot be read", "files that cannot be read"
    SEPARATOR = "name with a tab or a line break", "names with a tab or a line break"
    HIDDEN = "hidden file", "hidden files"
    OUTPUT = "file of a run or a pack", "files of runs or packs"
    COMPRESSED = "archive to be unpacked first", "archives to be unpacked first"
    UNREAD = "picture in a format that is not read", "pictures in formats that are not read"
    HEIC = "HEIC picture (the extra heic reads it)", "HEIC pictures (the extra heic reads them)"
    NO_IMAGE = "file that is no image", "files that are no images"
    TABLE = "table (Parquet or Arrow) that is not read", "tables (Parquet or Arrow) that are not read"
    REPEATED = "name that comes again", "names that come again"
    CONTRADICTED = (
        "name that comes again with another label (the first is kept)",
        "names that come again with other labels (the first is kept)",
    )
    LABEL = "label of a sample, which is read", "labels of samples, which are read"
    SIDECAR = "file beside a sample's image", "files beside samples' images"
    STRAY = "image beside the folders (--stray use keeps it)", "images beside the folders (--stray use keeps them)"
    NO_PATH = "line without a path", "lines without a path"
    OTHER_CLASS = (
        "test image of a class that no training image has",
        "test images of classes that no training image has",
    )
    OTHER_SPLIT = "image of another split", "images of other splits"


_TABLES = (".parquet", ".arrow", ".feather")
_SUFFIXES = {
    Reason.TABLE: _TABLES,
    Reason.COMPRESSED: (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".rar"),
    Reason.UNREAD: (".heic", ".heif", ".jxl", ".svg", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw", ".exr"),
}


class LeftOut:
    """Files that a source leaves out, by reason, with the first name of each."""

    def __init__(self) -> None:
        self.counts: dict[Reason, int] = {}
        self._firsts: dict[Reason, str] = {}
        self.suffixes = set[str]()
        """Suffixes of the files beside samples' images, which may hold labels."""
        self.by_content = False
        """Whether any file was found to be an image by its content."""

    def add(self, reason: Reason, name: str, count: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + count
        self._firsts.setdefault(reason, name)

    def merge(self, other: LeftOut) -> None:
        """Adds the files that another one has."""
        for reason, count in other.counts.items():
            self.add(reason, other._firsts[reason], count)
        self.suffixes |= other.suffixes
        self.by_content = self.by_content or other.by_content

    def reason_against(self, name: str, opened: Callable[[], BinaryIO], beside: Set[str]) -> Reason | None:
        """The reason why a file is no image; None for one by its suffix or, with another or none, by its content.

        A text is not opened if an image of its name is `beside` it, among the names in its folder or archive.
        """
        if is_image(name):
            return None
        stem, suffix = os.path.splitext(name)
        is_text = suffix.lower() in _TEXTS
        if is_text and any({stem + one, stem + one.upper()} & beside for one in IMAGE_SUFFIXES):
            return Reason.NO_IMAGE
        try:
            with opened() as file:
                start = file.read(16)
                stays_text = is_text and start[:4].isascii() and b"\0" not in start  # of images, only a PNM begins so
                if not stays_text and is_picture(file):
                    self.by_content = True
                    return None
        except OSError:
            return Reason.DAMAGED
        if start[4:8] == b"ftyp" and start[8:12] in _HEIC:
            return Reason.HEIC
        return next((reason for reason, suffixes in _SUFFIXES.items() if suffix.lower() in suffixes), Reason.NO_IMAGE)

    def line(self, source: Path) -> Remark:
        """One line with the count and the first name for each reason; empty if nothing is left out."""
        parts = [
            f"{count:,} {reason.value[count > 1]} ({'first ' * (count > 1)}{printable(self._firsts[reason])})"
            for reason, count in self.counts.items()
        ]
        counts = {reason.name.lower(): count for reason, count in self.counts.items()}
        return Remark(f"left out of {shown(source)}: {', '.join(parts)}" if parts else "", left_out=counts)

    def log(self, source: Path) -> None:
        """Logs the line, once in the life of the process and on the first rank only."""
        line = self.line(source)
        if line and line not in _logged and int(os.environ.get("RANK", "0")) == 0:
            _logged.add(line)
            _log.warning("%(line)s", line.fields())


def printable(name: str) -> str:
    """A name of a file in a message: escaped if it has characters that cannot be printed."""
    return name if name.isprintable() else repr(name)


def quoted(text: str) -> str:
    """A part of a file in a message: its first characters if it is long."""
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}…"


def name_of_class(text: str) -> str:
    """A label in a list of several in a message: with quotation marks if it has a comma."""
    return quoted(repr(text) if "," in text else text)


def is_image(name: str) -> bool:
    """Whether a name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def is_table(name: str) -> bool:
    """Whether a name has the suffix of a table (Parquet or Arrow)."""
    return os.path.splitext(name)[1].lower() in _TABLES
