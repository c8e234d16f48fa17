"""Looks into the images of a source: classes, sizes, duplicates, broken images, pixels; for `pic inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from trainer.data.config import SourceOptions
from trainer.data.decoded_images import DecodedImages
from trainer.data.listing import NO_LABEL, Listing
from trainer.data.manifest import Manifest, is_packed
from trainer.data.packed import PackedImages
from trainer.data.reading import kind_of_labels, read_source
from trainer.data.survey import sample

_SAMPLE = 1_000
_SHOWN = 10
_NO_LABEL = "no label"


class _Part(NamedTuple):
    """A split of a source, or a pack."""

    title: Sequence[str]
    images: Listing | PackedImages
    counts: Counter[int]
    """Number of images of each label."""
    classes: Sequence[str]


def inspect_source(source: Path, options: SourceOptions) -> Iterator[str]:
    """Lines about a source or pack: its reading, then for each split what its images are, of a sample of up to 1,000.

    Raises:
        ValueError: a source that cannot be read, or has no images.
    """
    if is_packed(source):
        options = options.of_pack(source, Manifest.load(source).options)
        parts = [_of_pack(directory) for directory in (source, source / "test") if is_packed(directory)]
    else:
        reading = read_source(source, options)
        yield f"{source}"
        yield from (f"  {line}" for line in reading.lines())
        parts = [_Part([f"{one.name or 'images'}:"], one.listing, one.counts, one.classes) for one in reading.splits]
    for number, part in enumerate(parts):
        yield from part.title
        if number == 1:
            yield from (f"  {line}" for line in _without_training(part, parts[0]))
        yield from (f"  {line}" for line in _lines(part, options))


def _of_pack(directory: Path) -> _Part:
    images = PackedImages(directory)
    manifest = images.manifest
    kind = kind_of_labels(manifest.labelled, manifest.classes)
    broken = f"; {len(images.replaced):,} broken, others stand for them" if len(images.replaced) else ""
    title = [
        f"{directory}: a pack of {len(images):,} images, {kind}, in the order of seed {manifest.order_seed}:",
        *(f"  {part.count:,} images of {part.source}" for part in manifest.ranges),
        f"  read with {manifest.options.said or 'no options'}{broken}",
    ]
    return _Part(title, images, Counter(images.labels().tolist()), manifest.classes)


def _without_training(tests: _Part, train: _Part) -> Iterator[str]:
    """A line for test images of classes that no training image has, which evaluations leave out."""
    alike = bool(tests.classes) == bool(train.classes)  # names are compared with names only
    known = {_name(train.classes, label) for label in train.counts} if alike else set[str]()
    others = {name: n for label, n in tests.counts.items() if (name := _name(tests.classes, label)) not in known}
    others.pop(_NO_LABEL, None)
    if others and train.counts.keys() - {NO_LABEL}:
        named = ", ".join(sorted(others)[:_SHOWN]) + ", …" * (len(others) > _SHOWN)
        yield f"{sum(others.values()):,} images of classes that no training image has, not evaluated: {named}"


def _lines(part: _Part, options: SourceOptions) -> Iterator[str]:
    if part.counts.keys() - {NO_LABEL}:
        most = part.counts.most_common()
        named = [f"{_name(part.classes, label)} {count:,}" for label, count in most[:_SHOWN]]
        yield f"classes, largest first: {', '.join(named)}{', …' * (len(most) > _SHOWN)}"
    images = DecodedImages(part.images, 1, options)
    found = sample(images, _SAMPLE)
    of = f"of {found.decoded:,} images that were decoded" + (", a sample" if found.decoded < found.number else "")
    if found.intact:
        sides = [min(one.width, one.height) for one in found.intact]
        yield f"shorter side {min(sides):,} to {max(sides):,} px, median {found.shorter_side:,.0f} ({of})"
        kinds = Counter(f"{one.format} {one.mode}" for one in found.intact)
        yield f"formats and pixels: {', '.join(f'{kind} {count:,}' for kind, count in kinds.most_common(_SHOWN))}"
        yield from found.warnings()
    if broken := found.broken:
        images.broken.list(broken)
        after = f"runs and packs end at more than {found.max_broken:,}: --max-broken allows more"
        yield f"broken: {len(broken):,} {of}, about {found.num_broken:,} in all; {after}; first {broken[0]}"
    yield from _duplicates(part.images)


def _name(names: Sequence[str], label: int) -> str:
    return _NO_LABEL if label == NO_LABEL else names[label] if names else str(label)


def _duplicates(images: Listing | PackedImages) -> Iterator[str]:
    """A line if images have the same bytes; only those of one length are read."""
    lengths: dict[int, list[int]] = {}
    for image, length in enumerate(images.lengths()):
        lengths.setdefault(int(length), []).append(image)
    copies, first, apart = 0, "", frozenset(images.replaced.tolist())
    for alike in lengths.values():
        known: dict[int, int] = {}
        for image in alike if len(alike) > 1 else ():
            if image in apart:
                continue
            try:
                original = known.setdefault(xxhash.xxh3_64_intdigest(images.read(image)), image)
            except OSError:
                continue  # it counts as broken
            if original != image:
                copies += 1
                first = first or f"{images.path(image)} of {images.path(original)}"
    if copies:
        yield f"duplicates by bytes: {copies:,}, first {first}; each trains as an image of its own"
