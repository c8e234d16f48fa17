"""The listing of a source's images: the place of each, in the order of their ids, and its label."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.archives import Member, read_member, read_single
from trainer.data.tables import IN_TABLE, read_cell
from weightserver.common.object_store import shown
from weightserver.core.arrays import Int64Array

NO_LABEL = -1
_SCANNED_BYTES = 1 << 24
_LINES = 64
"""Lines of a listing that are found and split together."""


class Entry(NamedTuple):
    """The location of an image's bytes."""

    label: int
    """Number of its class; −1 without labels."""
    offset: int
    """Offset in the tar; −1 for a plain file, −3 in a zip; of a table, its `mark`."""
    length: int
    """Length in the archive; −1 for a plain file, −2 in a table."""
    path: str
    """Path of the file or tar, relative to the source's folder unless it is absolute."""
    member: str
    """Name in the tar; empty for a plain file."""

    def line(self) -> bytes:
        """The line of a listing."""
        return os.fsencode("\t".join(map(str, self)) + "\n")

    @property
    def name(self) -> str:
        """Path and, in a tar, member, for people."""
        return f"{self.path}:{self.member}" if self.member else self.path


class Listing:
    """The entries of N images, one per line of `content`: label, offset, length, path and member, separated by tabs.

    `content` may be a mapped file: only the position of every 64th line is kept in memory.

    Args:
        root: the folder to which paths are relative; by its name, images are told apart.
        place: where that folder is read, if `root` lies in a bucket.

    Raises:
        ValueError: `content` is not a listing, or is empty.
    """

    def __init__(self, content: bytes | mmap.mmap, root: Path, place: Path | None = None) -> None:
        self.content, self.root, self.place = content, root, place or root
        self._number, self._starts = _line_starts(content)
        if not self._number or content[-1:] != b"\n":
            raise ValueError("a list of images is empty or cut off")

    @classmethod
    def open(cls, path: Path, root: Path, place: Path | None = None) -> Listing:
        """Opens the listing in a file."""
        if not path.is_file() or not path.stat().st_size:
            raise ValueError(f"{path} is missing or empty")
        with path.open("rb") as file:
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), root, place)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, image: int) -> Entry:
        if not 0 <= image < self._number:
            raise IndexError(f"image {image} is not in 0..{self._number - 1}")
        return _entry(self._lines(image // _LINES)[image % _LINES])

    def __iter__(self) -> Iterator[Entry]:
        """All entries in the order of their ids."""
        return (_entry(line) for group in range(len(self._starts)) for line in self._lines(group))

    def _lines(self, group: int) -> list[bytes]:
        """The lines of a group, without their ends."""
        stop = int(self._starts[group + 1]) if group + 1 < len(self._starts) else len(self.content)
        return self.content[int(self._starts[group]) : stop - 1].split(b"\n")

    def read(self, image: int) -> bytes:
        """The encoded bytes of image 0..N-1. Raises OSError if they cannot be read."""
        return self.read_entry(self[image])

    def read_entry(self, entry: Entry) -> bytes:
        """The encoded bytes of an entry. Raises OSError if they cannot be read."""
        if entry.length == IN_TABLE:
            return read_cell(self.place / entry.path, entry.member, entry.offset)
        if not entry.member:
            return read_single(self.place / entry.path)
        return read_member(self.place / entry.path, Member(entry.member, entry.offset, entry.length))

    def length(self, entry: Entry) -> int:
        """Number of encoded bytes of an entry, for which a table's image is read."""
        if not entry.member:
            return (self.place / entry.path).stat().st_size
        return len(self.read_entry(entry)) if entry.length == IN_TABLE else entry.length

    def lengths(self) -> Iterator[int]:
        """The number of encoded bytes of each image, in the order of their ids; −1 for a file that cannot be read."""
        for entry in self:
            try:
                yield self.length(entry)
            except OSError:
                yield -1

    def path(self, image: int) -> str:
        """Path of an image's file; in a tar, followed by a colon and the member's name."""
        return os.path.join(shown(self.root), self[image].name)

    def positions(self, images: Int64Array) -> Int64Array:
        """Positions in whose order images (int64 [n]) are read fastest."""
        return images

    def read_ahead(self, images: Int64Array) -> float:
        """Single files are not read ahead."""
        return 0.0

    def between(self, start: int, stop: int) -> Int64Array:
        """The images at positions start … stop−1, ascending: int64 [n]."""
        return np.arange(max(0, start), min(len(self), stop))

    def replaced(self, images: Int64Array) -> Int64Array:
        """No image stands for another one."""
        return np.empty(0, np.int64)

    def labels(self) -> Int64Array:
        """The class of each image, int64 [N]; −1 without labels."""
        lines = (line for group in range(len(self._starts)) for line in self._lines(group))
        return np.fromiter((int(line.partition(b"\t")[0]) for line in lines), np.int64, len(self))


def _entry(line: bytes) -> Entry:
    label, offset, length, path, member = os.fsdecode(line).split("\t")
    return Entry(int(label), int(offset), int(length), path, member)


def _line_starts(content: bytes | mmap.mmap) -> tuple[int, NDArray[np.int64]]:
    """The number of lines, and the offset of every 64th."""
    number, starts = 0, [np.zeros(1, np.int64)]
    for start in range(0, len(content), _SCANNED_BYTES):
        ends = np.flatnonzero(np.frombuffer(content[start : start + _SCANNED_BYTES], np.uint8) == ord("\n"))
        starts.append(ends[_LINES - 1 - number % _LINES :: _LINES] + start + 1)
        number += len(ends)
    found = np.concatenate(starts)
    return number, found[found < len(content)]
