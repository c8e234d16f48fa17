"""Compares a pack with what its source says now.

A pack keeps what its source said: each range has a listing with the path and the label of every image, and the manifest
the names of the classes, and the options by which the source was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.data.config import SourceOptions
from trainer.data.decode import BrokenImageError, facts
from trainer.data.listing import NO_LABEL, Entry, Listing
from trainer.data.manifest import Manifest, is_packed, listing_path
from trainer.data.packed import PackedImages
from trainer.data.reading import Reading, Split

_SHOWN = 3


@dataclass
class Changes:
    """Images that differ between a source and its pack: those to pack, and the names of others."""

    added: list[Entry] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    """Their bytes are packed under another name, which the source has no more."""
    changed: list[str] = field(default_factory=list)
    """Their files have other bytes now, or are no longer broken."""
    relabelled: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """Those added, if none of them can be read."""

    def lines(self) -> list[str]:
        """What differs, a line for each kind, with the first names."""
        kinds = {
            "added since, not packed: give --extend to pack them": [entry.name for entry in self.added],
            "removed since, still packed: to remove them, pack into a new directory": self.removed,
            "renamed since, packed under the old names: to have the new, pack into a new directory": self.renamed,
            "changed since, packed as they were: to have them as they are, pack into a new directory": self.changed,
            "labelled anew since, packed with the old labels: to have the new, pack into a new directory": (
                self.relabelled
            ),
            "added since, but none can be read, and none is packed: repair or remove them": self.unreadable,
        }
        return [f"{len(names):,} {kind} ({_some(names)})" for kind, names in kinds.items() if names]

    def outdated(self) -> str:
        """The first of the lines that no extension of the pack helps against; empty if there is none."""
        return next(iter(replace(self, added=[], unreadable=[]).lines()), "")

    def __iadd__(self, other: Changes) -> Changes:
        for name, found in vars(other).items():
            getattr(self, name).extend(found)
        return self


def changes_since(reading: Reading, packed: Path) -> Changes:
    """Compares a complete pack, with its test images, with what its source is read as now; see `split_changes`.

    The test images of a source that has none any more are removed.

    Raises:
        ValueError: a damaged pack.
    """
    changes = Changes()
    for split, directory in reading.to_pack(packed):
        changes += split_changes(split, directory)
    if reading.test is None and is_packed(test := packed / "test"):
        tests = _packed_entries(test)
        changes.removed += [entry.name for source, *_, entry in tests if Path(source).is_relative_to(reading.source)]
    return changes


def split_changes(split: Split, packed: Path) -> Changes:
    """Compares a complete pack with the images that a split has now; packed images of other sources are left out.

    Files are compared by path, length and time. Only those are read that were written after the pack, were broken then,
    or may be renamed ones. An image that had no file then has not changed while it has none, and one that has none yet
    is not added.

    Raises:
        ValueError: a damaged pack.
    """
    listing, changes = split.listing, Changes()
    images = PackedImages(packed)
    classes, options = images.manifest.classes, images.manifest.options
    broken, lengths, written_at = frozenset(images.replaced.tolist()), images.lengths(), images.written_at()

    def differs(number: int, entry: Entry) -> bool:
        """Whether the file of a packed image has other bytes now, or is no longer broken."""
        if number in broken:
            return any_intact([entry], listing, options)
        if listing.length(entry) != lengths[number]:
            return True
        is_newer = (listing.root / entry.path).stat().st_mtime_ns >= written_at[number]
        return bool(is_newer) and listing.read_entry(entry) != images.read(number)

    now = {_key(listing.root, entry): entry for entry in listing}
    gone: dict[int, list[tuple[int, Entry]]] = {}
    for source, number, key, entry in _packed_entries(packed):
        found = now.pop(key, None)
        if source != split.source:
            continue
        if found is None:
            gone.setdefault(-1 if number in broken else int(lengths[number]), []).append((number, entry))
        elif number not in broken and not (listing.root / found.path).exists():
            changes.removed.append(entry.name)
        else:
            if differs(number, found):
                changes.changed.append(entry.name)
            if _class(entry, classes) != _class(found, split.classes):
                changes.relabelled.append(entry.name)
    for entry in now.values():
        if not (listing.root / entry.path).exists():
            continue
        like = gone.get(listing.length(entry), []) if gone else []
        content = listing.read_entry(entry) if like else b""
        same = next((one for one in like if images.read(one[0]) == content), None)
        if same is None:
            changes.added.append(entry)
            continue
        like.remove(same)
        changes.renamed.append(entry.name)
        if _class(same[1], classes) != _class(entry, split.classes):
            changes.relabelled.append(entry.name)
    changes.removed += [entry.name for _, entry in sorted(one for like in gone.values() for one in like)]
    if not any_intact(changes.added, listing, options):
        changes.added, changes.unreadable = [], [entry.name for entry in changes.added]
    return changes


def any_intact(entries: Iterable[Entry], listing: Listing, options: SourceOptions) -> bool:
    """Whether any of the images can be read; it can then stand for those that cannot."""
    rendering = options.rendering("none")
    for entry in entries:
        with suppress(BrokenImageError, OSError):
            facts(listing.read_entry(entry), rendering)
            return True
    return False


def _class(entry: Entry, classes: Sequence[str]) -> str:
    """The name of an image's class, or its number; "-1" without a label."""
    return classes[entry.label] if classes and entry.label != NO_LABEL else str(entry.label)


def _key(root: Path, entry: Entry) -> str:
    """What identifies an image wherever it is listed."""
    return f"{root / entry.path}\0{entry.member}"


def _packed_entries(packed: Path) -> Iterator[tuple[str, int, str, Entry]]:
    """Source, id, key and entry of each packed image."""
    for part in Manifest.load(packed).ranges:
        listing = Listing.open(listing_path(packed, part.first), Path(part.root))
        numbers = range(part.first, part.first + part.count)
        for number, entry in zip(numbers, listing, strict=True):
            yield part.source, number, _key(listing.root, entry), entry


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
