"""Looks into the images of a source: classes, sizes, duplicates, broken images, pixels; for `pic inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from trainer.data.config import SourceOptions
from trainer.data.datasets import Stored, as_in_training, open_source
from trainer.data.decoded_images import DecodedImages
from trainer.data.left_out import name_of_class
from trainer.data.listing import NO_LABEL, Listing
from trainer.data.packed import PackedImages
from trainer.data.reading import kind_of_labels
from trainer.data.survey import sample
from weightserver.common.object_store import is_remote, shown

_SAMPLE = 1_000
_SHOWN = 10


def inspect_source(source: Path, options: SourceOptions) -> Iterator[str]:
    """Lines about a source or pack: its reading, then for each split what its images are, of a sample of up to 1,000.

    Raises:
        ValueError: a source that cannot be read, or has no images.
    """
    found = open_source(source, options)
    train, *_ = found.splits.values()
    if found.reading:
        yield from (shown(source), *(f"  {line}" for line in found.reading.lines()))
    for number, (name, part) in enumerate(found.splits.items()):
        yield from _title(part.images) if isinstance(part.images, PackedImages) else [f"{name or 'images'}:"]
        if number == 1:
            yield from (f"  {line}" for line in _without_training(part, train))
        yield from (f"  {line}" for line in _lines(part, found.options))


def _title(images: PackedImages) -> Iterator[str]:
    manifest = images.manifest
    kind = kind_of_labels(manifest.labelled, manifest.classes)
    order = f"in the order of seed {manifest.order_seed}"
    yield f"{shown(images.directory)}: a pack of {len(images):,} images, {kind}, {order}:"
    yield from (f"  {part.count:,} images of {part.source}" for part in manifest.ranges)
    replaced = sum(shard.num_broken for shard in manifest.shards)
    broken = f"; {replaced:,} broken, others stand for them" if replaced else ""
    yield f"  read with {manifest.options.said or 'no options'}{broken}"


def _without_training(tests: Stored, train: Stored) -> Iterator[str]:
    """A line for test images of classes that no training image has, which evaluations leave out."""
    if len(tests.labels) and len(train.labels):
        own = tests.labels.read()
        others = own[(as_in_training(own, tests.classes, train) == NO_LABEL) & (own != NO_LABEL)]
        names = sorted({_name(tests.classes, label) for label in others.tolist()})
        if names:
            named = ", ".join(map(name_of_class, names[:_SHOWN])) + ", …" * (len(names) > _SHOWN)
            yield f"{len(others):,} images of classes that no training image has, not evaluated: {named}"


def _lines(part: Stored, options: SourceOptions) -> Iterator[str]:
    counts = Counter(part.labels.read().tolist())
    if counts.keys() - {NO_LABEL}:
        most = counts.most_common()
        named = [f"{name_of_class(_name(part.classes, label))} {count:,}" for label, count in most[:_SHOWN]]
        yield f"classes, largest first: {', '.join(named)}{', …' * (len(most) > _SHOWN)}"
    images = DecodedImages(part.images, 1, options)
    found = sample(images, _SAMPLE)
    of = f"of {found.decoded:,} images that were decoded" + (", a sample" if found.decoded < found.number else "")
    if found.intact:
        sides = [min(one.width, one.height) for one in found.intact]
        yield f"shorter side {min(sides):,} to {max(sides):,} px, median {found.shorter_side:,.0f} ({of})"
        kinds = Counter(f"{one.format} {one.mode}" for one in found.intact)
        yield f"formats and pixels: {', '.join(f'{kind} {count:,}' for kind, count in kinds.most_common(_SHOWN))}"
        yield from found.lines()
    if broken := found.broken:
        images.broken.list(broken)
        after = f"runs and packs end at more than {found.max_broken:,}: --max-broken allows more"
        yield f"broken: {len(broken):,} {of}, about {found.num_broken:,} in all; {after}; first {broken[0]}"
    if isinstance(part.images, Listing) and is_remote(part.images.place):
        yield "duplicates: not looked for in a bucket, where each image is a request of its own"
        return
    yield from _duplicates(part.images)


def _name(names: Sequence[str], label: int) -> str:
    return "no label" if label == NO_LABEL else names[label] if names else str(label)


def _duplicates(images: Listing | PackedImages) -> Iterator[str]:
    """A line if images have the same bytes; only those of one length are read."""
    lengths: dict[int, list[int]] = {}
    for image, length in enumerate(images.lengths()):
        lengths.setdefault(int(length), []).append(image)
    copies, first, apart = 0, "", frozenset(images.replaced(np.arange(len(images))).tolist())
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
