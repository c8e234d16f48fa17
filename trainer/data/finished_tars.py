"""The finished tars of a pack that is not complete, on a disk or in a bucket.

    parts/PLAN-FIRST    of a finished tar: its line in the list of tars, and its records; written after the tar

PLAN is a digest of manifest.json. Which tars there are follows from the manifest alone: a command that is repeated, or
another number of parts, continues with what is missing.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.data.bucket_packs import absent, lost_tars, send
from trainer.data.config import SourceOptions
from trainer.data.index import check_index, damage_of_index
from trainer.data.manifest import (
    Manifest,
    Range,
    Shard,
    index_path,
    is_file,
    line_of,
    listing_path,
    read_file,
    shards_path,
    tar_path,
)
from trainer.data.pack_files import pack_files
from trainer.data.parts import WHOLE, Part
from trainer.data.reading import counted
from weightserver.common.atomic_files import atomic_write, directory_lock, locked, make_directory, sha256, sync
from weightserver.common.object_store import (
    ObjectStoreError,
    Reason,
    digest_of,
    directly_below,
    is_remote,
    remove,
    shown,
    write,
)

_READERS = 16
"""Notes that are read at the same time."""
_NOTE = re.compile(r"[0-9a-f]{12}-\d{12}")
_FILES_OF_A_PACK = (".tar", ".bin", ".jsonl")
_ADDING = ".adding"
"""File in a pack's parts/ on a disk that a process locks while it puts a tar in its place."""
_WORK = ".packing-"
"""Beginning of the names of work folders in a pack's parts/ on a disk."""


class Disk:
    """Where a pack is made; `Bucket` has the same methods."""

    def found(self, folder: Path) -> set[Path]:
        """What lies in a folder, which may be missing."""
        return set(folder.glob("*"))

    def note(self, path: Path, content: bytes) -> None:
        """Makes a small file, durably."""
        make_directory(path.parent)
        atomic_write(path, partial(Path.write_bytes, data=content))

    def keep(self, path: Path, target: Path, digest: str) -> None:
        """Moves a file of the pack out of a work folder, durably."""
        sync(path)
        path.replace(target)
        sync(target.parent)

    def digest(self, path: Path) -> str:
        """SHA-256 of a tar."""
        return sha256(path)

    def holds(self, tar: Path, shard: Shard) -> bool:
        """Whether a tar is that of a note, as far as can be told without reading it."""
        return tar.stat().st_size == shard.bytes

    @contextmanager
    def adding(self, there: Path) -> Iterator[None]:
        """Lets one process at a time put a tar in its place and note it."""
        make_directory(there / "parts")
        with locked(there / "parts" / _ADDING):
            yield

    def clear(self, there: Path) -> None:
        """Removes the notes of a pack whose ranges are complete, and what killed processes have left; no other process
        packs there."""
        parts = there / "parts"
        for path in self.found(parts):
            if _NOTE.fullmatch(path.name) or path.name == _ADDING:
                path.unlink()
            elif path.name.startswith(_WORK):
                shutil.rmtree(path)
        with suppress(OSError):
            parts.rmdir()

    def check(self, there: Path, manifest: Manifest) -> None:
        """Raises ValueError if a complete pack has lost files."""
        for part in manifest.finished.ranges:
            check_index(index_path(there, part.first), part.count)

    def damage(self, there: Path, manifest: Manifest) -> Iterator[str]:
        """A line for each file that differs from what a manifest says, as far as that range is finished."""
        for part in manifest.ranges:
            listing = {listing_path(there, part.first): part.listing_sha256}
            for path, digest in (part.digests(there) if part.shards else listing).items():
                if not path.is_file():
                    yield f"{path} is missing"
                elif path == index_path(there, part.first):
                    yield from damage_of_index(path, part)
                elif sha256(path) != digest:
                    yield f"{path} is damaged"

    def work_folder(self, target: Path, name: str, options: SourceOptions) -> AbstractContextManager[Path]:
        """An empty folder for the files of one process, which is removed afterwards.

        Raises:
            ValueError: no --cache-dir for a pack in a bucket.
            OSError: the disk cannot be written, or another process does the same there or with this --cache-dir.
        """
        return _emptied(target / "parts" / f"{_WORK}{name}")


class Bucket:
    def found(self, folder: Path) -> set[Path]:
        return {one.path for one in directly_below(folder)}

    def note(self, path: Path, content: bytes) -> None:
        write(path, content)

    def keep(self, path: Path, target: Path, digest: str) -> None:
        send(path, target, digest)
        path.unlink()

    def digest(self, path: Path) -> str:
        return digest_of(path)

    def holds(self, tar: Path, shard: Shard) -> bool:
        return digest_of(tar) == shard.sha256

    def adding(self, there: Path) -> AbstractContextManager[None]:
        return nullcontext()

    def clear(self, there: Path) -> None:
        if notes := notes_in(there):
            remove(notes)

    def check(self, there: Path, manifest: Manifest) -> None:
        if lost := lost_tars(there, manifest):
            raise ValueError(
                f"{counted(len(lost), 'tar')} of {shown(there)} missing or cut off, first {lost[0].name}: pack the "
                "images on a disk, and upload that"
            )

    def damage(self, there: Path, manifest: Manifest) -> Iterator[str]:
        for _, path, _ in absent(there, manifest.finished):
            yield f"{shown(path)} is missing or does not match its checksum: pack the images on a disk, and upload that"

    def work_folder(self, target: Path, name: str, options: SourceOptions) -> AbstractContextManager[Path]:
        return _emptied(options.in_cache("parts", *target.parts[1:], name))


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    with directory_lock(folder):
        shutil.rmtree(folder / "files", ignore_errors=True)  # of a process that was killed
        (folder / "files").mkdir()
        try:
            yield folder / "files"
        finally:
            shutil.rmtree(folder / "files", ignore_errors=True)


def backend_of(target: Path) -> Disk | Bucket:
    return Bucket() if is_remote(target) else Disk()


def notes_in(there: Path) -> list[Path]:
    """Notes of finished tars, of any plan."""
    return sorted(path for path in backend_of(there).found(there / "parts") if _NOTE.fullmatch(path.name))


def listing_of(there: Path, range_: Range, options: SourceOptions) -> Path:
    """The listing of a range; of a pack in a bucket in --cache-dir, which the parts on a machine share."""
    path = listing_path(there, range_.first)
    listing = pack_files(there, options).whole(path, range_.listing_sha256)
    if is_remote(there) and sha256(listing) != range_.listing_sha256:
        raise ObjectStoreError(path, Reason.DAMAGED)
    return listing


def check_unused(target: Path) -> None:
    """Raises ValueError if a place for a new pack holds files of another one."""
    backend = backend_of(target)
    found = backend.found(target) | backend.found(target / "test")
    if any(path.suffix in _FILES_OF_A_PACK for path in found):
        raise ValueError(f"{shown(target)} holds other files: give another place, or remove them")


class FinishedTars:
    """The tars of the last range of a pack, or of a part of it, each known by its first row.

    Attributes:
        missing: those that are not finished: they lack line and records, or are not there.

    Raises:
        ValueError: a pack on a disk has notes of another plan, as of parts that were packed elsewhere.
    """

    def __init__(self, there: Path, manifest: Manifest, part: Part = WHOLE) -> None:
        self.there, self.range, self._plan = there, manifest.ranges[-1], manifest.plan
        self.backend = backend_of(there)
        notes = notes_in(there)
        strangers = [path for path in notes if path.name[:12] != self._plan]
        if strangers and not is_remote(there):
            raise ValueError(
                f"{strangers[0]} is of other images, or of another order, than {there} has: remove it, or pack all "
                "parts again, into a new directory"
            )
        found = self.backend.found(there).union(notes)
        tars = self.range.tars(part)
        self._finished = [first for first in tars if {tar_path(there, first), self._note(first)} <= found]
        self.missing = sorted(set(tars).difference(self._finished))

    def _note(self, first: int) -> Path:
        """Where line and records of a tar are."""
        return self.there / "parts" / f"{self._plan}-{first:012d}"

    def finished(self) -> Iterator[tuple[Shard, bytes]]:
        """The finished tars, in order, and their records."""
        with ThreadPoolExecutor(_READERS) as pool:
            for start in range(0, len(self._finished), _READERS):
                yield from pool.map(self._noted, self._finished[start : start + _READERS])

    def _noted(self, first: int) -> tuple[Shard, bytes]:
        path, tar = self._note(first), tar_path(self.there, first)
        if (noted := read_file(path)) is None:
            raise joined_meanwhile(self.there)
        line, _, records = noted.partition(b"\n")
        try:
            shard = Shard(**json.loads(line))
        except (ValueError, TypeError):
            raise _damaged(path) from None
        if hashlib.sha256(records).hexdigest() != shard.index_sha256:
            raise _damaged(path)
        if not self.backend.holds(tar, shard):
            raise _damaged(tar)
        return shard, records

    def add(self, tar: Path, shard: Shard, records: bytes) -> None:
        """Keeps a tar of a work folder; from then on it is finished.

        Raises:
            ValueError: another command has finished it with other content.
        """
        target = tar_path(self.there, shard.first)
        with self.backend.adding(self.there):
            if not self._is_finished(shard):
                self.backend.keep(tar, target, shard.sha256)
                self.backend.note(self._note(shard.first), line_of(shard) + records)
                return
        if self.backend.digest(target) != shard.sha256:
            raise ValueError(
                f"{shown(target)} was packed by another command meanwhile, with other content, and stays: see "
                "whether the images have changed since they were listed"
            )
        tar.unlink()

    def _is_finished(self, shard: Shard) -> bool:
        """Whether another command has packed a tar meanwhile, too, as of a part that was given up."""
        named = (self._note(shard.first), shards_path(self.there, self.range.first))
        return is_file(tar_path(self.there, shard.first)) and any(map(is_file, named))

    def joined(self, folder: Path) -> Range:
        """The range with its tars, whose index and list are written into a folder."""
        make_directory(folder)
        shards = list[Shard]()

        def write(path: Path) -> None:
            with path.open("wb") as index:
                for shard, records in self.finished():
                    index.write(records)
                    shards.append(shard)

        atomic_write(index_path(folder, self.range.first), write)
        joined = replace(self.range, shards=tuple(shards))
        atomic_write(shards_path(folder, self.range.first), partial(Path.write_bytes, data=joined.list_of_tars))
        return joined


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{shown(path)} does not match its checksum: remove it, and repeat the command that packs it")


def joined_meanwhile(there: Path) -> ValueError:
    return ValueError(f"another command has joined the tars of {shown(there)} meanwhile: repeat this one")
