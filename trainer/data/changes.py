"""Compares a pack with the source that it came from: images that were added, removed, renamed or overwritten since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from trainer.data.listing import Entry, Listing
from trainer.data.manifest import Manifest, listing_path
from trainer.data.packed import PackedImages
from trainer.data.reading import Split

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


def changes_since(split: Split, packed: Path) -> Changes:
    """Compares the complete pack `packed` with the images that a source has now; other sources' images are left out.

    Files are compared by path, length and time. Only those are read that were written after the pack, or whose path has
    vanished while one of the same length is new.

    Raises:
        ValueError: a damaged pack.
    """
    listing = split.listing
    now = {
        key: entry
        for key, entry in zip(listing.hashes(), listing.entries(), strict=True)
        if _path(listing, entry).exists()
    }
    known, removed, changed = set[int](), dict[int, str](), list[str]()
    images = PackedImages(packed)
    lengths, written_at, shown = images.lengths(), images.written_at(), images.shown()
    for number, key, entry in _packed_entries(Manifest.load(packed, substitutes=False), packed, split.source):
        known.add(key)
        if key not in now:
            removed[number] = entry.name
        elif shown[number] == number:  # a broken image is not in the pack
            is_newer = _path(listing, now[key]).stat().st_mtime_ns >= written_at[number]
            same_length = listing.length(now[key]) == lengths[number]
            if not same_length or (is_newer and listing.read_entry(now[key]) != images.read(number)):
                changed.append(entry.name)
    added = [entry for key, entry in now.items() if key not in known]
    renamed = _renamed(images, removed, added, listing)
    old, new = {number for number, _ in renamed}, {entry for _, entry in renamed}
    return Changes(
        added=tuple(entry.name for entry in added if entry not in new),
        removed=tuple(name for number, name in removed.items() if number not in old),
        renamed=tuple((removed[number], entry.name) for number, entry in renamed),
        changed=tuple(changed),
    )


def _path(listing: Listing, entry: Entry) -> Path:
    return listing.root / entry.path


def _packed_entries(manifest: Manifest, packed: Path, source: str) -> Iterator[tuple[int, int, Entry]]:
    """Id, hash and entry of each packed image of a source."""
    for part in manifest.ranges:
        if part.source == source:
            listing = Listing.open(listing_path(packed, part.first), Path(part.root))
            yield from zip(range(part.first, part.first + part.count), listing.hashes(), listing.entries(), strict=True)


def _renamed(
    packed: PackedImages, removed: dict[int, str], added: list[Entry], listing: Listing
) -> list[tuple[int, Entry]]:
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
        if listing.length(entry) not in lengths:
            continue
        if same := by_content.get(xxhash.xxh3_64_intdigest(listing.read_entry(entry))):
            pairs.append((same.pop(0), entry))
    return pairs


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
