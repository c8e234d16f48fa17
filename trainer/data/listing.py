"""Lists images in a tree of folders, in one tar per class, or in a list of paths; always in the same order.

Ids follow the order of names: folders and files by the code points of their names, members of a tar and lines of a list
in their own order.
"""

from __future__ import annotations

import logging
import mmap
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainer.data.decode import IMAGE_SUFFIXES
from weightserver.core.arrays import Int64Array

_log = logging.getLogger(__name__)
NO_LABEL = -1
_MAX_DIGITS = 18
"""Maximum length of a label, which is an int64."""
_SCANNED_BYTES = 1 << 26


class Entry(NamedTuple):
    """The location of an image's bytes."""

    label: int
    """Number of its class; −1 without labels."""
    offset: int
    """Offset in the tar; −1 for a plain file."""
    length: int
    """Length in the tar; −1 for a plain file."""
    path: str
    """Path of the file or tar, relative to the source's folder unless it is absolute."""
    member: str
    """Name in the tar; empty for a plain file."""


class ImageSource:
    """A tree of images, or a list of them: a folder, or a text file with one path per line and optional labels.

    If a folder contains only folders and tars, each of them is a class, by its name (without .tar), as in ImageNet-1K
    and in ImageNet-11K/22K's folders or tars of synsets; if it contains images, they have no labels. The lines of a
    list are `path`, or `path<tab or blank>label` with a label of 0 or more, all of one kind; paths are relative to the
    list's folder, and repeated paths are omitted. `labelled` False discards labels. `classes` are already known, and
    keep their numbers.

    Raises:
        ValueError: no such file or folder.
    """

    def __init__(self, source: Path, *, labelled: bool = True, classes: Sequence[str] = ()) -> None:
        self.is_list = source.is_file()
        if not self.is_list and not source.is_dir():
            raise ValueError(f"no such folder or list of images: {source}")
        self.source = source
        self.root = source.parent if self.is_list else source
        folders = [] if self.is_list else _classes(source)
        self.labelled = labelled and (bool(folders) or (self.is_list and _list_has_labels(source)))
        names = [name.removesuffix(".tar") for name in folders] if self.labelled else []
        self.classes = [*classes, *sorted(set(names) - set(classes))]
        """Names of the classes by number; empty for a list, whose labels are numbers."""
        self.kind = kind_of_labels(self.labelled, names)

    def entries(self) -> Iterator[Entry]:
        """The images in the order of their ids. Raises ValueError if they cannot be listed."""
        if self.is_list:
            yield from _list_entries(self.source, self.labelled)
            return
        numbers = {name: number for number, name in enumerate(self.classes)}
        for child in _sorted(self.root):
            label = numbers.get(child.name.removesuffix(".tar"), NO_LABEL) if self.labelled else NO_LABEL
            if self.labelled and label == NO_LABEL:
                continue  # a folder that appeared after the classes were listed, or not a folder
            if _is_tar(child):
                yield from _tar_entries(Path(child.path), child.name, label)
            else:
                for path in _walk(child, ()):
                    yield Entry(label, -1, -1, os.path.relpath(path, self.root), "")


def kind_of_labels(labelled: bool, classes: Sequence[str]) -> str:
    """The kind of labels, as messages name it."""
    return ("labels by name" if classes else "labels by number") if labelled else "no labels"


class Listing:
    """The entries of N images, one per line of `content`: label, offset, length, path and member, separated by tabs.

    `content` may be a mapped file: only the positions of its lines are kept in memory.

    Raises:
        ValueError: `content` is not a listing, or is empty.
    """

    def __init__(self, content: bytes | mmap.mmap, root: Path) -> None:
        self._content, self._root = content, root
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
        line = os.fsdecode(self._content[start : int(self._ends[image]) - 1])
        label, offset, length, path, member = line.split("\t")
        return Entry(int(label), int(offset), int(length), path, member)

    def read(self, image: int) -> bytes:
        """The encoded bytes of image 0..N-1. Raises OSError if they cannot be read."""
        entry = self[image]
        with (self._root / entry.path).open("rb") as file:
            if entry.offset < 0:
                return file.read()
            file.seek(entry.offset)
            return file.read(entry.length)

    def name(self, image: int) -> str:
        """The name of an image in messages."""
        entry = self[image]
        return f"{self._root / entry.path}" + (f":{entry.member}" if entry.member else "")

    def positions(self, images: Int64Array) -> Int64Array:
        """Positions in whose order images (int64 [n]) are read fastest."""
        return images

    def replaced(self) -> Int64Array:
        """No image stands for another one."""
        return np.empty(0, np.int64)

    def entries(self) -> Iterator[Entry]:
        """All entries in the order of their ids."""
        return map(self.__getitem__, range(len(self)))

    def labels(self) -> Int64Array:
        """The class of each image, int64 [N]; −1 without labels."""
        return np.fromiter((entry.label for entry in self.entries()), np.int64, len(self))


def listing_lines(entries: Iterable[Entry], on_left_out: Callable[[str], object] = _log.warning) -> Iterator[bytes]:
    """The lines of a listing. An entry whose name contains a separator is omitted and reported to `on_left_out`."""
    for entry in entries:
        name = f"{entry.path}:{entry.member}" if entry.member else entry.path
        if any(mark in name for mark in "\t\n\r"):
            on_left_out(f"omitted: {name!r} has a tab or a line break in its name: rename it and add it later")
        else:
            yield os.fsencode("\t".join(map(str, entry)) + "\n")


def image_hash(path: Path, member: str) -> int:
    """The 64-bit hash that identifies an image."""
    return xxhash.xxh3_64_intdigest(os.fsencode(f"{path}\0{member}"))


def _classes(root: Path) -> list[str]:
    """Names of the class folders and tars in a folder; empty if it also contains images."""
    names = []
    for child in _sorted(root):
        if child.is_dir() or _is_tar(child):
            names.append(child.name)
        elif _is_image(child.name):
            return []
    return names


def _sorted(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as children:
        return sorted((child for child in children if not child.name.startswith(".")), key=lambda child: child.name)


def _is_tar(child: os.DirEntry[str]) -> bool:
    return child.name.endswith(".tar") and child.is_file()


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _walk(child: os.DirEntry[str], above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Paths of the images at and below `child`; links are followed, except in cycles."""
    if not child.is_dir():
        if _is_image(child.name):
            yield child.path
        return
    status = child.stat()
    here = (status.st_dev, status.st_ino)
    if here not in above:
        for grandchild in _sorted(child.path):
            yield from _walk(grandchild, (*above, here))


def _tar_entries(path: Path, name: str, label: int) -> Iterator[Entry]:
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isreg() and _is_image(member.name):
                    yield Entry(label, member.offset_data, member.size, name, member.name)
    except tarfile.TarError as error:
        raise ValueError(f"{path} is not a complete tar ({error}): fetch it again, or move it away") from None


def _list_lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:  # without a byte order mark
        for number, line in enumerate(lines, 1):
            if line.startswith("#"):
                raise ValueError(
                    f"{path}, line {number}: comments are not supported: remove it, or write ./# for a file"
                )
            if line.strip():
                yield number, line.strip()


def _split(line: str) -> tuple[str, str]:
    """Path and label of a list's line; the label may be empty."""
    path, tab, label = line.partition("\t")
    if tab:
        return path.strip(), label.strip()
    path, _, label = line.rpartition(" ")
    return (path.strip(), label) if path and label.isdecimal() else (line, "")


def _list_has_labels(path: Path) -> bool:
    return any(_split(line)[1] for _, line in _list_lines(path))


def _list_entries(path: Path, labelled: bool) -> Iterator[Entry]:
    known = set()
    for number, line in _list_lines(path):
        name, label = _split(line)
        if labelled and not label.isdecimal():
            raise ValueError(
                f"{path}, line {number}: {label or 'no label'}: give all images a number of 0 or more, or none"
            )
        if labelled and len(label) > _MAX_DIGITS:
            raise ValueError(f"{path}, line {number}: {label[:30]}: give labels of at most {_MAX_DIGITS} digits")
        if (key := image_hash(path.parent / name, "")) not in known:
            known.add(key)
            yield Entry(int(label) if labelled else NO_LABEL, -1, -1, name, "")


def _line_ends(content: bytes | mmap.mmap) -> NDArray[np.int64]:
    """Offsets just after the end of each line, int64 [lines]."""
    ends = [
        np.flatnonzero(np.frombuffer(content[start : start + _SCANNED_BYTES], np.uint8) == ord("\n")) + start + 1
        for start in range(0, len(content), _SCANNED_BYTES)
    ]
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)
