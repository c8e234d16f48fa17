"""Compares a pack with the source that it came from: images that were added, removed or overwritten since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    changed: tuple[str, ...] = ()
    """Their files have other bytes now."""

    def lines(self) -> list[str]:
        """What differs, a line for each kind, with the first names."""
        kinds = {
            "added since, not packed: give --extend to pack them": self.added,
            "removed or renamed since, still packed: to remove them, pack into a new directory": self.removed,
            "changed since, packed as they were: to have them as they are, pack into a new directory": self.changed,
        }
        return [f"{len(names):,} {kind} ({_some(names)})" for kind, names in kinds.items() if names]


def changes_since(split: Split, packed: Path) -> Changes:
    """Compares the complete pack `packed` with the images that a source has now; other sources' images are left out.

    Files are compared by path, length and time. Only those are read that were written after the pack.

    Raises:
        ValueError: a damaged pack.
    """
    listing = split.listing
    now = {
        key: entry
        for key, entry in zip(listing.hashes(), listing.entries(), strict=True)
        if _path(listing, entry).exists()
    }
    known, removed, changed = set[int](), list[str](), list[str]()
    images = PackedImages(packed)
    lengths, written_at, shown = images.lengths(), images.written_at(), images.shown()
    for number, key, entry in _packed_entries(Manifest.load(packed), packed, split.source):
        known.add(key)
        if key not in now:
            removed.append(entry.name)
        elif shown[number] == number:  # a broken image is not in the pack
            is_newer = _path(listing, now[key]).stat().st_mtime_ns >= written_at[number]
            same_length = listing.length(now[key]) == lengths[number]
            if not same_length or (is_newer and listing.read_entry(now[key]) != images.read(number)):
                changed.append(entry.name)
    return Changes(
        added=tuple(entry.name for key, entry in now.items() if key not in known),
        removed=tuple(removed),
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


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
