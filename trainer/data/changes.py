"""Compares a pack with what its source says now.

A pack keeps what its source said: each range has a listing with the path and the label of every image, and the manifest
the names of the classes, and the options by which the source was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
    """Images that differ between a source and its pack."""

    added: list[Entry] = field(default_factory=list)
    """Images that an extension packs."""
    unreadable: list[Entry] = field(default_factory=list)
    """Those added, if none of them can be read."""
    differing: list[tuple[str, str]] = field(default_factory=list)
    """Images that are packed otherwise than the source has them: how they differ now, and their names."""

    def lines(self) -> list[str]:
        """What differs, with the first names."""
        lines = []
        if self.added:
            lines.append(f"{_some('added', _names(self.added))}, not packed: give --extend to pack them")
        if self.unreadable:
            lines.append(f"{_some('added', _names(self.unreadable))}, but none can be read: repair or remove them")
        if outdated := self.outdated():
            lines.append(f"{outdated}: to have them as they are, pack into a new directory")
        return lines

    def outdated(self) -> str:
        """A line for the differences that no extension of the pack mends; empty without any."""
        found: dict[str, list[str]] = {}
        for how, name in self.differing:
            found.setdefault(how, []).append(name)
        return ", ".join(_some(how, names) for how, names in found.items())

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
        names = [entry.name for source, *_, entry in tests if Path(source).is_relative_to(reading.source)]
        changes.differing += [("removed", name) for name in names]
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

    def compare(packed_entry: Entry, entry: Entry, *hows: str) -> None:
        """Notes how an image differs, also if its class does."""
        if _class(packed_entry, classes) != _class(entry, split.classes):
            hows += ("labelled anew",)
        changes.differing += [(how, entry.name) for how in hows]

    now = {_key(listing.root, entry): entry for entry in listing}
    gone: dict[int, list[tuple[int, Entry]]] = {}
    for source, number, key, entry in _packed_entries(packed):
        found = now.pop(key, None)
        if source != split.source:
            continue
        if found is None:
            gone.setdefault(-1 if number in broken else int(lengths[number]), []).append((number, entry))
        elif number not in broken and not (listing.root / found.path).exists():
            changes.differing.append(("removed", entry.name))
        else:
            compare(entry, found, *(["changed"] if differs(number, found) else []))
    for entry in now.values():
        if not (listing.root / entry.path).exists():
            continue
        like = gone.get(listing.length(entry), []) if gone else []
        content = listing.read_entry(entry) if like else b""
        same = next((one for one in like if images.read(one[0]) == content), None)
        if same is None:
            changes.added.append(entry)
        else:
            like.remove(same)
            compare(same[1], entry, "renamed")
    changes.differing += [("removed", entry.name) for _, entry in sorted(one for like in gone.values() for one in like)]
    if not any_intact(changes.added, listing, options):
        changes.added, changes.unreadable = [], changes.added
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


def _names(entries: Iterable[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def _some(how: str, names: Sequence[str]) -> str:
    return f"{len(names):,} {how} since ({', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)})"
