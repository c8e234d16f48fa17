"""Parts of a pack, which several processes make, and how they become one pack.

Each part has a list and an index of its own, whose names tell the plan (a digest of manifest.json, which has that of
the listing) and the part: shards-FIRST.PLAN.2-of-4.jsonl. Its tars are those of the pack.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.data.index import check_index, cut_index, read_records
from trainer.data.manifest import (
    Manifest,
    Shard,
    cut_shards,
    index_path,
    line_of,
    packs_in,
    shards_in,
    shards_path,
)
from trainer.data.parts import WHOLE, Part
from trainer.data.reading import counted
from weightserver.common.atomic_files import append_synced, atomic_write, locked

LOCK = ".packing"
"""File in a packed directory that those who pack into it lock: parts together, others alone."""
PLANNING = ".planning"
"""File that the part that lists the images locks; the others wait for it, but not until it has packed them."""
_LISTED = 5
"""Most parts that a message names."""


def parts_begun(directory: Path, manifest: Manifest) -> set[Part]:
    """The parts of the last range that were begun.

    Raises:
        ValueError: they do not belong together.
    """
    found, plan = set[Part](), manifest.plan
    for path in sorted(directory.glob(f"shards-{manifest.ranges[-1].first:012d}.*.jsonl")):
        named = re.fullmatch(r"shards-\d+\.(\w+)\.(\d+)-of-(\d+)\.jsonl", path.name)
        if named is None or named[1] != plan:
            raise ValueError(
                f"{path} is a part of other images, or in another order, than {directory} has: remove it, or pack all "
                "parts again, into a new directory"
            )
        found.add(Part(int(named[2]), int(named[3])))
    if len(numbers := sorted({part.of for part in found})) > 1:
        raise ValueError(
            f"{directory} has parts of {numbers[0]} and of {numbers[1]}, which overlap: remove the shards- and index- "
            "files of one"
        )
    return found


class TarsOnDisk:
    """The tars of the last range of a directory, or of a part of it, each named in a list when its files are in place.

    Attributes:
        folder: where tars are written.
        list: the file that names them.
    """

    def __init__(self, directory: Path, manifest: Manifest, part: Part | None) -> None:
        self.folder, self._tars = directory, manifest.ranges[-1].tars(part or WHOLE)
        self.list, self._index = _files(directory, manifest, part)

    def finished(self) -> Iterator[tuple[Shard, bytes]]:
        """The tars that are named, with their records; what a killed process wrote beyond these is cut off."""
        shards = shards_in(self.list, self._tars)
        cut_shards(self.list, shards)
        cut_index(self._index, sum(shard.count for shard in shards))
        for shard in shards:
            start = shard.first - self._tars.start
            yield shard, read_records(self._index, start, start + shard.count)

    def add(self, shard: Shard, records: bytes) -> None:
        """Names a tar that is in `folder`."""
        append_synced(self._index, records)
        append_synced(self.list, line_of(shard))


def merge(output: Path) -> Manifest:
    """Joins the parts of a pack, and of its test images; reads and copies no tar. A pack that is joined stays as it is.

    Returns the manifest of the training images.

    Raises:
        ValueError: parts that are missing, not finished, or do not belong together; nothing is changed.
    """
    Manifest.load(output)  # which says that there is none, before a lock is made there
    with locked(output / LOCK, wait=False):
        joined = {each: _joined(each, output) for each in packs_in(output)}
        for directory, manifest in joined.items():
            range_ = manifest.ranges[-1]
            if manifest != Manifest.load(directory):
                indexes = [path for _, path, _ in _parts(directory, manifest)]
                atomic_write(index_path(directory, range_.first), partial(_concatenate, indexes))
                manifest.save(directory)
            for kind in ("shards", "index"):
                for path in directory.glob(f"{kind}-{range_.first:012d}.*.*"):
                    path.unlink()
    return joined[output]


def _joined(directory: Path, output: Path) -> Manifest:
    """The manifest with the tars of all parts."""
    manifest = Manifest.load(directory)
    range_ = manifest.ranges[-1]
    if manifest.complete:
        return manifest
    if not parts_begun(directory, manifest):
        raise ValueError(f"{directory} has no parts to join: 'pic pack SOURCE {output} --part I/N' packs them")
    unfinished, shards = list[Part](), list[Shard]()
    for part, index, found in _parts(directory, manifest):
        rows = range_.tars(part)
        number = sum(shard.count for shard in found)
        if number < rows.stop - rows.start:
            unfinished.append(part)
        else:
            check_index(index, number)
        shards += found
    if unfinished:
        named = ", ".join(map(str, unfinished[:_LISTED])) + (", …" if len(unfinished) > _LISTED else "")
        raise ValueError(
            f"{counted(len(unfinished), 'part')} of {directory} missing or not finished, {named}: repeat "
            f"'pic pack SOURCE {output} --part {unfinished[0]}' for each"
        )
    return replace(manifest, ranges=(*manifest.ranges[:-1], replace(range_, shards=tuple(shards))))


def _parts(directory: Path, manifest: Manifest) -> Iterator[tuple[Part, Path, tuple[Shard, ...]]]:
    """Each part that has rows, with its index and the tars that it names."""
    of = max(parts_begun(directory, manifest)).of
    for part in (Part(number, of) for number in range(of)):
        if tars := manifest.ranges[-1].tars(part):
            path, index = _files(directory, manifest, part)
            yield part, index, shards_in(path, tars) if path.exists() else ()


def _files(directory: Path, manifest: Manifest, part: Part | None) -> tuple[Path, Path]:
    """List and index of the tars of the last range, or of a part of it."""
    first, name = manifest.ranges[-1].first, f".{manifest.plan}.{part.number}-of-{part.of}" if part else ""
    return shards_path(directory, first, name), index_path(directory, first, name)


def _concatenate(paths: Sequence[Path], output: Path) -> None:
    with output.open("wb") as joined:
        for path in paths:
            with path.open("rb") as file:
                shutil.copyfileobj(file, joined)
