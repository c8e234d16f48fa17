"""Compares a pack with what its source lists now.

A pack keeps what its source said: each range has a listing with the path and the label of every image, and the manifest
the names of the classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.data.listing import NO_LABEL, Entry, Listing
from trainer.data.manifest import Manifest, listing_path
from trainer.data.reading import Reading, Split

_SHOWN = 3


@dataclass
class Changes:
    """Images that differ between a source and its pack; an image is known by its path."""

    added: list[Entry] = field(default_factory=list)
    removed: list[Entry] = field(default_factory=list)
    relabelled: list[Entry] = field(default_factory=list)
    """Images of another class now, or without one."""

    def lines(self) -> list[str]:
        """What differs, with the first names."""
        lines = [f"{_some(self.added, 'added')}, not packed: give --extend to pack them"] if self.added else []
        outdated = [(self.removed, "removed"), (self.relabelled, "labelled anew")]
        if found := ", ".join(_some(entries, how) for entries, how in outdated if entries):
            lines.append(f"{found}: to have them as they are, pack into a new directory")
        return lines


def changes_since(reading: Reading, packed: Path) -> Changes:
    """Compares a complete pack, with its test images, with what its source is read as now."""
    changes = Changes()
    for split, directory in reading.to_pack(packed):
        found = split_changes(split, directory)
        changes.added += found.added
        changes.removed += found.removed
        changes.relabelled += found.relabelled
    return changes


def split_changes(split: Split, packed: Path) -> Changes:
    """Compares a complete pack with the images that a split has now; packed images of other sources are left out.

    Raises:
        ValueError: a damaged pack.
    """
    manifest, changes = Manifest.load(packed), Changes()
    now = {_key(split.listing.root, entry): entry for entry in split.listing}
    for source, key, entry in _packed_entries(packed, manifest):
        found = now.pop(key, None)
        if source != split.source:
            continue
        if found is None:
            changes.removed.append(entry)
        elif _class(entry, manifest.classes) != _class(found, split.classes):
            changes.relabelled.append(found)
    changes.added += now.values()
    return changes


def _class(entry: Entry, classes: Sequence[str]) -> str:
    """The name of an image's class, or its number; "-1" without a label."""
    return classes[entry.label] if classes and entry.label != NO_LABEL else str(entry.label)


def _key(root: Path, entry: Entry) -> str:
    """What identifies an image wherever it is listed."""
    return f"{root / entry.path}\0{entry.member}"


def _packed_entries(packed: Path, manifest: Manifest) -> Iterator[tuple[str, str, Entry]]:
    """Source, key and entry of each packed image."""
    for part in manifest.ranges:
        listing = Listing.open(listing_path(packed, part.first), Path(part.root))
        for entry in listing:
            yield part.source, _key(listing.root, entry), entry


def _some(entries: Sequence[Entry], how: str) -> str:
    names = ", ".join(entry.name for entry in entries[:_SHOWN])
    return f"{len(entries):,} {how} since ({names}{', ...' * (len(entries) > _SHOWN)})"
