"""Sources of images in a bucket: they are copied to this machine and read there; numbered tars that are too large for
that are read where they are."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from zlib import crc32

from trainer.data.cache import writing
from trainer.data.config import SourceOptions
from weightserver.common.atomic_files import atomic_write, locked, make_directory
from weightserver.common.object_store import (
    Found,
    ObjectStoreError,
    Reason,
    copy_range,
    directly_below,
    find,
    found_below,
    is_remote,
    shown,
)
from weightserver.common.threads import in_other_thread

_PATTERN = re.compile(r"\{(\d+)\.\.(\d+)\}")
"""Numbered archives in the name of a source."""
_COPIES = 8
"""Files that are copied at the same time."""


def numbered(source: Path) -> list[Path]:
    """The archives that a pattern in the name of a source stands for; empty without one."""
    if not (pattern := _PATTERN.search(source.name)):
        return []
    first, last = pattern.groups()
    numbers = range(int(first), int(last) + 1)
    return [source.with_name(source.name.replace(pattern[0], f"{number:0{len(first)}d}")) for number in numbers]


def check_numbered(source: Path, wanted: Sequence[Path], there: Container[Path]) -> None:
    """Raises ValueError if archives of a source are not among what is there."""
    if missing := [path for path in wanted if path not in there]:
        raise ValueError(
            f"{shown(source)}: {len(missing):,} of its {len(wanted):,} files are missing, first {shown(missing[0])}"
        )


def place_of(source: Path, options: SourceOptions) -> Path:
    """Where a source is read: for one in a bucket, its copy in --cache-dir. Raises ValueError without --cache-dir."""
    return options.in_cache("sources", *source.parts[1:]) if is_remote(source) else source


def local_source(source: Path, options: SourceOptions) -> Path:
    """Where a source is read. What lies in a bucket, and is not copied yet or has changed, is copied first, except
    numbered tars that are too large for --cache-gib: they are read in the bucket.

    Raises:
        ValueError: objects that are missing or refused, or too large for --cache-gib.
        OSError: the disk cannot be written.
    """
    place = place_of(source, options)
    if place == source:
        return source
    found = _objects(source)
    size = sum(one.bytes for one in found)
    if size > options.cache_bytes and numbered(source) and source.suffix.lower() == ".tar":
        return source
    if size > options.cache_bytes:
        raise ValueError(
            f"{shown(source)} has {size / 2**30:,.2f} GiB, more than --cache-gib: give more, or copy it to a disk; "
            "numbered tars alone, s3://BUCKET/{00000..41407}.tar, are read where they are"
        )
    make_directory(options.in_cache("sources"))
    copies = {place_of(one.path, options): one for one in found}

    def copy_all() -> None:
        with locked(options.in_cache("sources", ".lock")), ThreadPoolExecutor(_COPIES) as pool:
            for path in place.rglob("*"):
                if path.is_file() and path not in copies:
                    path.unlink()  # the object is gone
            list(pool.map(copy, copies.values(), copies))

    def copy(one: Found, target: Path) -> None:
        if not is_left:
            _copy(one, target)

    is_left = False
    try:
        in_other_thread(copy_all)
    finally:
        is_left = True  # an interrupt ends it before the copies do
    return place


@contextmanager
def whole(path: Path, options: SourceOptions) -> Iterator[Path]:
    """A file, or a copy of an object, which no other process sees and which is gone afterwards.

    Raises:
        ValueError: an object that is missing or refused; a disk of --cache-dir that cannot be written.
    """
    if not is_remote(path):
        yield path
        return
    [one] = _objects(path)
    with ExitStack() as stack:
        with writing(options.in_cache()):
            make_directory(options.in_cache())
            file = stack.enter_context(tempfile.TemporaryFile(dir=options.in_cache()))
            copy_range(path, 0, one.bytes, file, is_whole=True)
            file.flush()
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _objects(source: Path) -> list[Found]:
    if wanted := numbered(source):
        there = {one.path: one for one in directly_below(source.parent)}
        check_numbered(source, wanted, there)
        return [there[path] for path in wanted]
    if only := find(source):
        return [only]
    found = [one for one in found_below(source) if one.bytes]  # others may stand for folders
    if not found:
        raise ObjectStoreError(source, Reason.MISSING)
    return found


def _copy(one: Found, target: Path) -> None:
    """Copies an object unless its copy is there, of the same length and version."""
    stamp = _stamp(one)
    if target.is_file() and (target.stat().st_size, target.stat().st_mtime_ns) == (one.bytes, stamp):
        return

    def write(path: Path) -> None:
        with path.open("wb") as file:
            copy_range(one.path, 0, one.bytes, file, is_whole=True)
        os.utime(path, ns=(stamp, stamp))

    make_directory(target.parent)
    atomic_write(target, write)


def _stamp(one: Found) -> int:
    """The time of modification, ns, of an object's copy. Stores tell whole seconds: the rest tells versions apart."""
    return int(one.written.timestamp()) * 10**9 + crc32(one.version.encode()) % 10**9
