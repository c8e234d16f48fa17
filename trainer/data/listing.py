"""The listing of a source's images: the place of each, in the order of their ids, and its label."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.archives import Member, read_member
from trainer.data.tables import IN_TABLE, read_cell
from weightserver.core.arrays import Int64Array

NO_LABEL = -1
_SCANNED_BYTES = 1 << 26


class Entry(NamedTuple):
    """The location of an image's bytes."""

    label: int
    """Number of its class; −1 without labels."""
    offset: int
    """Offset in the tar; −1 for a plain file, −3 in a zip; the row of a table."""
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

    `content` may be a mapped file: only the positions of its lines are kept in memory.

    Raises:
        ValueError: `content` is not a listing, or is empty.
    """

    def __init__(self, content: bytes | mmap.mmap, root: Path) -> None:
        self.content, self.root = content, root
        self._ends = _line_ends(content)
        if not len(self._ends) or self._ends[-1] != len(content):
            raise ValueError("a list of images is empty or cut off")

    @classmethod
    def open(cls, path: Path, root: Path) -> Listing:
        """Opens the listing in a file."""
        if not path.is_file() or not path.stat().st_size:
            raise ValueError(f"{path} is missing or empty")
        with path.open("rb") as file:
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), root)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, image: int) -> Entry:
        start = int(self._ends[image - 1]) if image > 0 else 0
        line = os.fsdecode(self.content[start : int(self._ends[image]) - 1])
        label, offset, length, path, member = line.split("\t")
        return Entry(int(label), int(offset), int(length), path, member)

    def read(self, image: int) -> bytes:
        """The encoded bytes of image 0..N-1. Raises OSError if they cannot be read."""
        return self.read_entry(self[image])

    def read_entry(self, entry: Entry) -> bytes:
        """The encoded bytes of an entry. Raises OSError if they cannot be read."""
        if entry.length == IN_TABLE:
            return read_cell(self.root / entry.path, entry.member, entry.offset)
        if not entry.member:
            return (self.root / entry.path).read_bytes()
        return read_member(self.root / entry.path, Member(entry.member, entry.offset, entry.length))

    def length(self, entry: Entry) -> int:
        """Number of encoded bytes of an entry, for which a table's image is read."""
        if not entry.member:
            return (self.root / entry.path).stat().st_size
        return len(self.read_entry(entry)) if entry.length == IN_TABLE else entry.length

    def lengths(self) -> Iterator[int]:
        """The number of encoded bytes of each image, in the order of their ids; −1 for a file that cannot be read."""
        for entry in self.entries():
            try:
                yield self.length(entry)
            except OSError:
                yield -1

    def path(self, image: int) -> str:
        """Path of an image's file; in a tar, followed by a colon and the member's name."""
        return os.path.join(self.root, self[image].name)

    def positions(self, images: Int64Array) -> Int64Array:
        """Positions in whose order images (int64 [n]) are read fastest."""
        return images

    @property
    def replaced(self) -> Int64Array:
        """No image stands for another one."""
        return np.empty(0, np.int64)

    def entries(self) -> Iterator[Entry]:
        """All entries in the order of their ids."""
        return map(self.__getitem__, range(len(self)))

    def labels(self) -> Int64Array:
        """The class of each image, int64 [N]; −1 without labels."""
        lines = bytes(self.content).split(b"\n")[:-1]
        return np.fromiter((int(line.partition(b"\t")[0]) for line in lines), np.int64, len(self))


def _line_ends(content: bytes | mmap.mmap) -> NDArray[np.int64]:
    """Offsets just after the end of each line, int64 [lines]."""
    ends = [
        np.flatnonzero(np.frombuffer(content[start : start + _SCANNED_BYTES], np.uint8) == ord("\n")) + start + 1
        for start in range(0, len(content), _SCANNED_BYTES)
    ]
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)
