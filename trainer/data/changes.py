"""Compares a pack with the source that it came from: images that were added, removed, renamed or overwritten since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from trainer.data.listing import Entry, ImageSource, Listing, image_hash, is_listable
from trainer.data.manifest import Manifest, listing_path
from trainer.data.packed import PackedImages

_SHOWN = 3


@dataclass(frozen=True)
class Changes:
    """Names of images that differ between a source and its pack."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    """Name in the pack, and in the source; the files have the same bytes."""
    changed: tuple[str, ...] = ()
    """Their files have other bytes now."""

    def lines(self) -> list[str]:
        """What differs, a line for each kind, with the first names."""
        renamed = tuple(f"{old} -> {new}" for old, new in self.renamed)
        kinds = {
            "added since, not packed: give --extend to pack them": self.added,
            "removed since, still packed: to remove them, pack into a new directory": self.removed,
            "renamed since, packed under the old name: --extend would pack them twice": renamed,
            "changed since, packed as they were: to have them as they are, pack into a new directory": self.changed,
        }
        return [f"{len(names):,} {kind} ({_some(names)})" for kind, names in kinds.items() if names]


def changes_since(source: Path, packed: Path) -> Changes:
    """Compares the complete pack `packed` with the images that `source` has now; other sources' images are left out.

    Files are compared by path, length and time. Only those are read that were written after the pack, or whose path has
    vanished while one of the same length is new.

    Raises:
        ValueError: a source that cannot be listed, or a damaged pack.
    """
    source = source.resolve()
    manifest = Manifest.load(packed, substitutes=False)
    found = ImageSource(source)
    entries = [entry for entry in found.entries() if not found.is_list or (found.root / entry.path).exists()]
    now = {image_hash(found.root / entry.path, entry.member): entry[1:3] for entry in entries}
    known, removed, changed = set[int](), dict[int, str](), list[str]()
    images = PackedImages(packed)
    lengths, written_at, shown = images.lengths(), images.written_at(), images.shown()
    for number, root, entry in _packed_entries(manifest, packed, source):
        key = image_hash(root / entry.path, entry.member)
        known.add(key)
        if key not in now:
            removed[number] = entry.name
        elif shown[number] == number:  # a broken image is not in the pack
            file = _File.at(root / entry.path, *now[key])
            is_newer = file.written_at >= written_at[number]
            if file.length != lengths[number] or (is_newer and file.read() != images.read(number)):
                changed.append(entry.name)
    listable = filter(is_listable, entries)
    added = [entry for entry in listable if image_hash(found.root / entry.path, entry.member) not in known]
    renamed = _renamed(images, removed, added, found.root)
    old, new = {number for number, _ in renamed}, {entry for _, entry in renamed}
    return Changes(
        added=tuple(entry.name for entry in added if entry not in new),
        removed=tuple(name for number, name in removed.items() if number not in old),
        renamed=tuple((removed[number], entry.name) for number, entry in renamed),
        changed=tuple(changed),
    )


class _File(NamedTuple):
    """An image as it is in the source now."""

    path: Path
    offset: int
    length: int
    written_at: int
    """In nanoseconds since 1970."""

    @classmethod
    def at(cls, path: Path, offset: int, length: int) -> _File:
        """`offset` and `length` are those of its entry, -1 for a plain file."""
        status = path.stat()
        return cls(path, max(0, offset), length if offset >= 0 else status.st_size, status.st_mtime_ns)

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)


def _packed_entries(manifest: Manifest, packed: Path, source: Path) -> Iterator[tuple[int, Path, Entry]]:
    """Id, root and entry of each packed image of a source."""
    for part in manifest.ranges:
        if part.source == str(source):
            listing = Listing.open(listing_path(packed, part.first), Path(part.root))
            for number, entry in enumerate(listing.entries(), part.first):
                yield number, Path(part.root), entry


def _renamed(packed: PackedImages, removed: dict[int, str], added: list[Entry], root: Path) -> list[tuple[int, Entry]]:
    """Ids of removed images and added entries with the same bytes."""
    if not removed or not added:
        return []
    shown = packed.shown()
    by_content: dict[int, list[int]] = {}
    lengths = set[int]()
    for number in removed:
        if shown[number] == number:  # a broken image is not in the pack
            content = packed.read(number)
            lengths.add(len(content))
            by_content.setdefault(xxhash.xxh3_64_intdigest(content), []).append(number)
    pairs = []
    for entry in added:
        file = _File.at(root / entry.path, entry.offset, entry.length)
        if file.length in lengths and (same := by_content.get(xxhash.xxh3_64_intdigest(file.read()))):
            pairs.append((same.pop(0), entry))
    return pairs


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
