"""Lists images in a tree of folders, in one tar per class, or in a list of paths; always in the same order.

Ids follow the order of names: folders and files by the code points of their names, members of a tar and lines of a list
in their own order.
"""

from __future__ import annotations

import mmap
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainer.data.tree import LeftOut, Reason, Tree, is_image
from weightserver.core.arrays import Int64Array

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

    @property
    def name(self) -> str:
        """Path and, in a tar, member, for people."""
        return f"{self.path}:{self.member}" if self.member else self.path


class ImageSource:
    """A tree of images, or a list of them: a folder, or a text file with one path per line and optional labels.

    If a folder contains only folders and tars, each of them is a class, by its name (without .tar), as in ImageNet-1K
    and in ImageNet-11K/22K's folders or tars of synsets; folders without images are no classes. If it contains images,
    they have no labels. The lines of a list are `path`, or `path<tab or blank>label`. The labels are numbers of 0 or
    more, or all of them are names; a name after a blank follows the suffix of an image. Paths are relative to the
    list's folder, and repeated paths are omitted. Of a folder, each real file is listed once, however many links lead
    to it, and links to missing files and empty files are left out (`trainer.data.tree`). `labelled` False discards
    labels. `classes` are already known, and keep their numbers.

    Raises:
        ValueError: no such file or folder.
    """

    def __init__(self, source: Path, *, labelled: bool = True, classes: Sequence[str] = ()) -> None:
        self.is_list = source.is_file()
        if not self.is_list and not source.is_dir():
            raise ValueError(f"no such folder or list of images: {source}")
        self.source = source
        self.root = source.parent if self.is_list else source
        folders = [] if self.is_list else _classes(Tree(source, LeftOut()))
        names = [name.removesuffix(".tar") for name in folders]
        has_labels = bool(folders)
        if self.is_list:
            has_labels, names = _labels_of_list(source)
        self.labelled = labelled and has_labels
        names = names if self.labelled else []
        self.classes = [*classes, *sorted(set(names) - set(classes))]
        """Names of the classes by number; empty for a list whose labels are numbers."""
        self.kind = kind_of_labels(self.labelled, names)

    def entries(self, left_out: LeftOut | None = None) -> Iterator[Entry]:
        """The images in the order of their ids; `left_out` counts the files that are none of them.

        Raises:
            ValueError: they cannot be listed.
        """
        numbers = {name: number for number, name in enumerate(self.classes)}
        if self.is_list:
            yield from _list_entries(self.source, self.labelled, numbers)
            return
        tree = Tree(self.root, left_out or LeftOut())
        for child in tree.children():
            label = numbers.get(child.name.removesuffix(".tar"), NO_LABEL) if self.labelled else NO_LABEL
            listed = not self.labelled or label != NO_LABEL  # or else it appeared after the classes were listed
            if tree.is_tar(child):
                if listed:
                    yield from _tar_entries(Path(child.path), child.name, label)
                continue
            for path in tree.images(child):
                if listed:
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

    def path(self, image: int) -> str:
        """Path of an image's file; in a tar, followed by a colon and the member's name."""
        return self.name(image)

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


def listing_lines(entries: Iterable[Entry], left_out: LeftOut | None = None) -> Iterator[bytes]:
    """The lines of a listing. `left_out` counts the entries whose name contains a separator, which are left out."""
    for entry in entries:
        if is_listable(entry):
            yield os.fsencode("\t".join(map(str, entry)) + "\n")
        elif left_out is not None:
            left_out.add(Reason.SEPARATOR, entry.name)


def is_listable(entry: Entry) -> bool:
    """Whether a listing can hold an entry: its name contains no separator."""
    return not any(mark in entry.name for mark in "\t\n\r")


def image_hash(path: Path, member: str) -> int:
    """The 64-bit hash that identifies an image."""
    return xxhash.xxh3_64_intdigest(os.fsencode(f"{path}\0{member}"))


def _classes(tree: Tree) -> list[str]:
    """Names of the tars and of the folders with images in a folder; empty if it also contains images."""
    names = []
    for child in tree.children():
        if tree.is_tar(child) or any(True for _ in tree.images(child)):
            if is_image(child.name) and not child.is_dir():
                return []
            names.append(child.name)
    return names


def _tar_entries(path: Path, name: str, label: int) -> Iterator[Entry]:
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isreg() and member.size and is_image(member.name):
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
    is_label = label.isdecimal() or (is_image(path.strip()) and not is_image(label))
    return (path.strip(), label) if path and is_label else (line, "")


def _labels_of_list(path: Path) -> tuple[bool, list[str]]:
    """Whether a list has labels, and their names if they are not numbers."""
    labels = {_split(line)[1] for _, line in _list_lines(path)} - {""}
    return bool(labels), sorted(labels) if labels and not any(map(str.isdecimal, labels)) else []


def _list_entries(path: Path, labelled: bool, numbers: Mapping[str, int]) -> Iterator[Entry]:
    known = set()
    for number, line in _list_lines(path):
        name, label = _split(line)
        if labelled and (not label or (not numbers and not label.isdecimal())):
            raise ValueError(
                f"{path}, line {number}: {label or 'no label'}: give all images a number of 0 or more, all of them a "
                "name, or none"
            )
        if labelled and not numbers and len(label) > _MAX_DIGITS:
            raise ValueError(f"{path}, line {number}: {label[:30]}: give labels of at most {_MAX_DIGITS} digits")
        if (key := image_hash(path.parent / name, "")) not in known:
            known.add(key)
            yield Entry((numbers[label] if numbers else int(label)) if labelled else NO_LABEL, -1, -1, name, "")


def _line_ends(content: bytes | mmap.mmap) -> NDArray[np.int64]:
    """Offsets just after the end of each line, int64 [lines]."""
    ends = [
        np.flatnonzero(np.frombuffer(content[start : start + _SCANNED_BYTES], np.uint8) == ord("\n")) + start + 1
        for start in range(0, len(content), _SCANNED_BYTES)
    ]
    return np.concatenate(ends) if ends else np.zeros(0, np.int64)
