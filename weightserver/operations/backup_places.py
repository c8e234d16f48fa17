"""Where backups are: each in a folder beside others, on a disk or in the bucket of an object store."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weightserver.common import object_store
from weightserver.common.atomic_files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    atomic_directory,
    atomic_write,
    directory_lock,
)

MANIFEST = "manifest.json"
"""The file that a complete backup has."""
Write = Callable[[str, bytes], str]
"""Writes a file of a new backup, by its path in it and its content; returns the path that it was given."""
_FILE = re.compile(r"shard-\d+/\w+(-\w+)*\.safetensors")


@dataclass(frozen=True)
class Folder:
    """A folder on a disk. Its methods raise OSError."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def beside(self, name: str) -> Folder:
        """The folder of that name beside this one."""
        return Folder(self.path.resolve().parent / name)

    def names(self) -> list[str]:
        """Names of the folders beside this one, whatever they hold; of this one too, if it exists. A link, such as
        `latest`, is none, nor is what a command is writing or has left."""
        folder = self.path.resolve().parent
        paths = folder.iterdir() if folder.exists() else ()
        return [path.name for path in paths if path.suffix != ".partial" and path.is_dir() and not path.is_symlink()]

    def read(self, file: str) -> bytes | None:
        """A file of the backup; None if there is none."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self.path / file).read_bytes()
        return None

    @contextlib.contextmanager
    def new(self) -> Iterator[Write]:
        """Yields what writes the files of a new backup, from any thread; the manifest last. On failure none is left.
        Raises ValueError if the folder holds something."""
        with atomic_directory(self.path, mode=PRIVATE_DIRECTORY) as new:

            def write(file: str, content: bytes) -> str:
                path = new / file
                path.parent.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
                atomic_write(path, lambda partial: partial.write_bytes(content), mode=PRIVATE_FILE)
                return file

            yield write

    def remove(self) -> None:
        """Removes the backup, and nothing else that is in its folder; one that is removed in part is none any more, and
        `remove_killed` removes the rest."""
        (self.path / MANIFEST).unlink()
        partial = self.path.with_name(f".{self.name}-{os.urandom(4).hex()}.partial")
        partial.mkdir(PRIVATE_DIRECTORY)
        for shard in self.path.glob("shard-*"):
            shard.rename(partial / shard.name)
        with contextlib.suppress(OSError):  # another backup may be in it
            self.path.rmdir()
        shutil.rmtree(partial)

    def remove_killed(self) -> None:
        """Removes what killed commands left beside this one, and nothing that a command is writing."""
        folder = self.path.resolve().parent
        for partial in folder.glob(".*.partial"):
            with contextlib.suppress(OSError):  # it is being written, or has got its name
                files = [str(path.relative_to(partial)) for path in partial.rglob("*") if not path.is_dir()]
                if not all(map(_FILE.match, files)):  # another program's, or has its manifest, and may get its name now
                    continue
                target = folder / partial.name[1 : -len(".partial")]
                with directory_lock(target):
                    shutil.rmtree(partial)
                target.rmdir()


@dataclass(frozen=True)
class BucketFolder:
    """What is below s3://BUCKET/NAME: as `Folder`, but its methods raise ObjectStoreError. What a killed backup left
    there goes when a backup of this name is complete. Buckets have no locks: of several commands at once, each writes
    files of its own, and that one wins which makes the manifest."""

    path: Path

    def __str__(self) -> str:
        return object_store.shown(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def beside(self, name: str) -> BucketFolder:
        return BucketFolder(self.path.parent / name)

    def names(self) -> list[str]:
        return object_store.folders(self.path.parent)

    def read(self, file: str) -> bytes | None:
        return object_store.unless_missing(lambda: object_store.read(self.path / file))

    @contextlib.contextmanager
    def new(self) -> Iterator[Write]:
        if not all(map(self._has, object_store.below(self.path))):
            raise ValueError(f"{self} is not empty: give another folder")

        written = list[Path]()
        attempt = os.urandom(4).hex()

        def write(file: str, content: bytes) -> str:
            if file == MANIFEST:
                self._complete(content, written)
            else:
                file = f"{file.removesuffix('.safetensors')}-{attempt}.safetensors"
                written.append(self.path / file)
                object_store.write(self.path / file, content)
            return file

        try:
            yield write
        except BaseException:
            with contextlib.suppress(object_store.ObjectStoreError):
                object_store.remove(written)
            raise

    def _complete(self, manifest: bytes, written: list[Path]) -> None:
        """Makes the manifest, and removes what killed commands have left. Raises ValueError if another command was
        first, or has removed what this one has written."""
        path, mine = self.path / MANIFEST, [*written]
        written.clear()  # from here on the manifest may be there, which needs them, however this ends
        is_first = object_store.create(path, manifest) == manifest
        if is_first:
            mine.append(path)
        found = set(object_store.below(self.path))
        if not is_first or not found.issuperset(mine):
            object_store.remove(mine)
            raise ValueError(f"another command wrote to {self} meanwhile: give another folder")
        object_store.remove(list(filter(self._has, found.difference(mine))))

    def _has(self, path: Path) -> bool:
        """Whether an object below this name is a backup's of this name, but not its manifest."""
        return bool(_FILE.fullmatch(str(path.relative_to(self.path))))

    def remove(self) -> None:
        found = list(filter(self._has, object_store.below(self.path)))  # what is written from now on is another's
        object_store.remove([self.path / MANIFEST])
        object_store.remove(found)

    def remove_killed(self) -> None:
        """Does nothing: without locks, what was killed cannot be told from what is being written."""


Place = Folder | BucketFolder


def place_at(path: Path) -> Place:
    """The place of a backup. Raises ValueError for a bucket without a folder in it."""
    if not object_store.is_remote(path):
        return Folder(path)
    if len(path.parts) < 3:
        raise ValueError(f"{object_store.shown(path)} is a whole bucket: give s3://BUCKET/NAME")
    return BucketFolder(path)
