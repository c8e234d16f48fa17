"""Walks a source's folders and archives, each real file once, and keeps its images in the order of their names."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path

from trainer.data.archives import are_shards, images_in, members, prefix_of, samples_in
from trainer.data.config import TRAINING, SourceOptions, split_of
from trainer.data.left_out import LeftOut, Reason, is_image, quoted

_BLOCK_BYTES = 1 << 14
"""Lines of images that are kept, and forgotten, together."""
_NUMBER = re.compile(r"\d{4,}")
"""Name of a folder that may be a shard; 001 may be a class."""


class Folder:
    """The images at and below a folder or in an archive, in order: lines of a listing whose labels are still texts."""

    def __init__(self, name: str, left_out: LeftOut) -> None:
        self.name, self._left_out = name, left_out
        self.loose = 0
        """Number of images that lie in no folder below."""
        self.own = False
        """Whether its images have labels of their own, or none, as the samples of shards and the rows of tables."""
        self._parts: list[bytearray | Folder] = []
        self._named = dict[str, Folder]()

    def folders(self) -> list[Folder]:
        """The folders with images."""
        return [part for part in self._parts if isinstance(part, Folder) and part.count()]

    def classes(self) -> list[Folder]:
        """The folders that may be classes: those with images that have no labels of their own."""
        return [folder for folder in self.folders() if not folder.own_labels]

    @property
    def own_labels(self) -> bool:
        """Whether images here or below are such."""
        return self.own or any(folder.own_labels for folder in self.folders())

    def count(self) -> int:
        """Number of images, with those of all folders below."""
        return self.loose + sum(folder.count() for folder in self._parts if isinstance(folder, Folder))

    def folder(self, name: str) -> Folder:
        """The folder of that name, which is added if there is none."""
        if name not in self._named:
            self.add_folder(Folder(name, self._left_out))
        return self._named[name]

    def add_folder(self, folder: Folder) -> None:
        self._parts.append(folder)
        self._named.setdefault(folder.name, folder)

    def add(self, path: str, member: str = "", *, offset: int = -1, length: int = -1, label: str | None = None) -> None:
        """Adds an image; offset and length are those in an archive, and the label is its own, or empty."""
        if any(mark in path or mark in member for mark in "\t\n\r"):
            self._left_out.add(Reason.SEPARATOR, f"{path}:{member}" if member else path)
            return
        last = self._parts[-1] if self._parts else None
        if not isinstance(last, bytearray) or len(last) > _BLOCK_BYTES:
            self._parts.append(last := bytearray())
        last += os.fsencode(f"{label or ''}\t{offset}\t{length}\t{path}\t{member}\n")
        self.loose += 1
        self.own = self.own or label is not None

    def first_loose(self) -> str:
        """The path of the first image that lies in no folder below; in an archive, followed by the member's name."""
        lines = next(part for part in self._parts if isinstance(part, bytearray))
        return path_in(bytes(lines).partition(b"\n")[0])

    def take(self, other: Folder) -> None:
        """Moves the images of another folder that lie in no folder below it here."""
        self._parts += [part for part in other._parts if isinstance(part, bytearray)]
        self.loose += other.loose
        other._parts, other.loose = [part for part in other._parts if isinstance(part, Folder)], 0

    def lines(self, *, forget: bool = False) -> Iterator[tuple[str, str, bytes]]:
        """For each image, in order: the class folder that it lies in (empty for none), its own label as a text, and the
        rest of its line. With `forget`, the images are gone from here when they were yielded."""
        for number, part in enumerate(self._parts):
            if isinstance(part, Folder):
                place = "" if part.own_labels else part.name
                for _, label, rest in part.lines(forget=forget):
                    yield place, label, rest
            else:
                for line in bytes(part).split(b"\n")[:-1]:
                    text, _, fields = line.partition(b"\t")
                    yield "", os.fsdecode(text), fields
                if forget:
                    self._parts[number] = bytearray()


def path_in(line: bytes) -> str:
    """The path of an image's file in its line of a listing; in an archive, followed by the member's name."""
    *_, path, member = os.fsdecode(line).split("\t")
    return f"{path}:{member}" if member else path


class Walk:
    """One walk over a folder.

    Links are followed, except to what the walk comes to by itself: folders and files in the walked folders that are
    not hidden. No folder is walked twice. Directories of runs and packs are never walked.
    """

    def __init__(self, root: Path, left_out: LeftOut, options: SourceOptions) -> None:
        self._root, self._left_out, self._options = root, left_out, options
        self._real_roots = {os.path.realpath(root)}
        status = root.stat()
        self._walked = {(status.st_dev, status.st_ino)}
        self.num_shards = 0
        self.has_tars = False
        """Whether there is anything that --tars decides."""
        self.tables: list[str] = []
        """Paths of the tables (Parquet or Arrow), relative to the source; they are read if there are no images."""
        self.notes: list[str] = []
        """Lines that say what was decided, some of them several times."""

    def folder(self, path: str = "", name: str = "") -> Folder:
        """The images at and below a folder; without a path, of the source."""
        here = Folder(name, self._left_out)
        with os.scandir(path or self._root) as found:
            children = sorted(found, key=lambda child: child.name)
        names = {child.name for child in children if not _is_hidden(child.name)}
        found_tars = (child for child in children if child.name in names and _is_tar(child))
        tars = dict.fromkeys(found_tars)  # of many, one is soon found
        shards = bool(tars) and self._are_shards([*tars])
        self.has_tars = self.has_tars or bool(tars) or _NUMBER.fullmatch(name) is not None
        splits = self._splits_of([*tars]) if shards else {}
        alone = len(tars) == 1 and not any(
            is_folder(child) or is_image(child.name) for child in children if child.name in names
        )
        children.reverse()
        while children:
            child = children.pop()  # so that the status that it keeps is soon gone
            if _is_hidden(child.name):
                self._leave_out(Reason.HIDDEN, child, _num_files(child))
            elif is_folder(child):
                if self._enters(child):
                    here.add_folder(self.folder(child.path, child.name))
            elif child in tars:
                if self._keeps_file(child):
                    into = here.folder(splits[child.name]) if splits else here
                    self._add_tar(into, child, shard=shards, tree=alone)
            elif self._keeps_file(child):
                reason = self._left_out.reason_against(child.name, partial(FileIO, child.path), names)
                if reason is Reason.TABLE and not child.name.startswith("cache-"):  # as `datasets` calls its own
                    self.tables.append(self._relative(child))
                elif reason:
                    self._leave_out(reason, child)
                else:
                    here.add(self._relative(child))
        if self._options.tars != "classes" and here.loose and _NUMBER.fullmatch(name):
            texts = {name.rpartition(".")[0] for name in names if name.endswith((".json", ".txt"))}
            here.own = all(name.rpartition(".")[0] in texts for name in names if is_image(name))
            if here.own:
                self.notes.append("its numbered folders are shards of samples: --tars classes takes each for a class")
        return here

    def _splits_of(self, shards: list[os.DirEntry[str]]) -> Mapping[str, str]:
        """The split of each shard by its name: a word in all of them, or the prefixes that --split names."""
        prefixes = {shard.name: prefix_of(shard.name) for shard in shards}
        words = {shard: split_of(prefix) for shard, prefix in prefixes.items()}
        names = list(dict.fromkeys(prefixes.values()))
        if self._options.split and not set(names).isdisjoint(self._options.split.split(":")):
            return prefixes
        if len(names) > 1 and all(words.values()):
            return words
        if len(names) > 1 and any(words.values()) and all(names):
            train, test, *_ = sorted(names, key=lambda name: split_of(name) not in TRAINING)
            self.notes.append(
                f"shards {quoted(', '.join(names))} are read together: --split {train}:{test} trains on the first"
            )
        return {}

    def _are_shards(self, tars: list[os.DirEntry[str]]) -> bool:
        if self._options.tars is None:
            return are_shards([Path(tar.path) for tar in tars])
        return self._options.tars == "shards"

    def _add_tar(self, here: Folder, child: os.DirEntry[str], *, shard: bool, tree: bool) -> None:
        self.num_shards += shard
        self.notes.append(
            "its tars are shards of samples: --tars classes takes each for a class"
            if shard
            else "its tars are read as folders: --tars shards takes them for shards of samples"
        )
        if not shard and not tree:
            here = here.folder(os.path.splitext(child.name)[0])
        kept = self._options if shard else None
        add_archive(here, Path(child.path), self._relative(child), self._left_out, kept, tree=tree)

    def _enters(self, child: os.DirEntry[str]) -> bool:
        status = child.stat()
        here = (status.st_dev, status.st_ino)
        real = os.path.realpath(child.path) if child.is_symlink() else ""
        if here in self._walked or (real and self._is_walked(real)):
            self._leave_out(Reason.LINKED, child)
            return False
        if is_output(Path(child.path)):
            self._leave_out(Reason.OUTPUT, child, _num_files(child))
            return False
        self._walked.add(here)
        if real:
            self._real_roots.add(real)
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
        elif child.is_symlink() and self._is_walked(os.path.realpath(child.path)):
            reason = Reason.LINKED
        if reason:
            self._leave_out(reason, child)
        return reason is None

    def _is_walked(self, real: str) -> bool:
        """Whether the walk comes to a real path by itself, or leaves it out in the directory of a run or a pack."""
        while real not in self._real_roots:
            above, name = os.path.split(real)
            if above == real or _is_hidden(name):
                return False
            real = above
        return True

    def _relative(self, child: os.DirEntry[str]) -> str:
        return os.path.relpath(child.path, self._root)

    def _leave_out(self, reason: Reason, child: os.DirEntry[str], num_files: int = 1) -> None:
        if num_files:
            self._left_out.add(reason, self._relative(child), num_files)


def add_archive(
    here: Folder, path: Path, shown: str, left_out: LeftOut, samples: SourceOptions | None, *, tree: bool
) -> None:
    """Adds an archive's images: samples of a shard, or images in the folders that the members' names have.

    Args:
        tree: whether they are in the order of a folder's, by name; otherwise in their own, which no folder may change.

    Raises:
        ValueError: not a complete archive.
    """
    found = members(path, shown, left_out)
    if samples:
        for member, label in samples_in(path, shown, found, left_out, samples.label_key):
            here.add(shown, member.name, offset=member.offset, length=member.length, label=label)
        return
    if tree:
        found = dict(sorted(found.items(), key=lambda one: one[0].replace("/", "\0")))
    images = dict(images_in(path, shown, found, left_out))
    in_folders = tree or _are_in_turn([above for above, _ in itertools.groupby(map(_above, images))])
    for name, member in images.items():
        into = here
        for part in _above(name) if in_folders else ():
            into = into.folder(part)
        into.add(shown, member.name, offset=member.offset, length=member.length)


def _above(name: str) -> list[str]:
    return name.split("/")[:-1]


def _are_in_turn(folders: list[list[str]]) -> bool:
    """Whether members lie in several folders, one after the other."""
    for depth in range(1, max(map(len, folders), default=0) + 1):
        runs = [tuple(above) for above, _ in itertools.groupby(folder[:depth] for folder in folders)]
        if len(set(runs)) < len(runs):
            return False
    return len(set(map(tuple, folders))) > 1


def is_output(folder: Path) -> bool:
    """Whether a folder is a run's directory or a pack, which hold pictures of their own."""
    for name in ("config.json", "manifest.json"):
        try:
            content = json.loads((folder / name).read_bytes()) if (folder / name).is_file() else None
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and isinstance(content.get("format"), int):
            return True
    return False


def _num_files(child: os.DirEntry[str]) -> int:
    """Number of files in a folder; 1 for anything else."""
    return sum(len(files) for _, _, files in os.walk(child.path)) if is_folder(child) else 1


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "lost+found"  # of a volume, which only root may read


def _is_tar(child: os.DirEntry[str]) -> bool:
    return child.name.lower().endswith(".tar") and not is_folder(child)


def is_folder(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link to itself
