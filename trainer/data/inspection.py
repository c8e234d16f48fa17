"""Looks into the images of a source: classes, sizes, duplicates, broken images, pixels; for `pic inspect`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from trainer.data.config import SourceOptions
from trainer.data.decode import ImageFacts
from trainer.data.decoded_images import DecodedImages
from trainer.data.listing import NO_LABEL, Listing
from trainer.data.manifest import Manifest, is_packed
from trainer.data.packed import PackedImages
from trainer.data.reading import kind_of_labels, read_source
from weightserver.core.arrays import Int64Array

_SAMPLE = 1_000
_SHOWN = 10


def inspect_source(source: Path, options: SourceOptions) -> Iterator[str]:
    """Lines about a source or pack: its reading, then for each split what its images are, of a sample of up to 1,000.

    Raises:
        ValueError: a source that cannot be read, or has no images.
    """
    if is_packed(source):
        yield from _pack_lines(source, options)
        return
    reading = read_source(source, options)
    yield f"{source}"
    yield from (f"  {line}" for line in reading.lines())
    for split in reading.splits:
        yield f"{split.name or 'images'}:"
        yield from (f"  {line}" for line in _lines(split.listing, split.counts, split.classes, options))


def _pack_lines(source: Path, options: SourceOptions) -> Iterator[str]:
    options = options.of_pack(source, Manifest.load(source).options)
    for directory in filter(is_packed, (source, source / "test")):
        images = PackedImages(directory)
        manifest = images.manifest
        kind = kind_of_labels(manifest.labelled, manifest.classes)
        yield f"{directory}: a pack of {len(images):,} images, {kind}, in the order of seed {manifest.order_seed}:"
        yield from (f"  {part.count:,} images of {part.source}" for part in manifest.ranges)
        broken = f"; {len(images.replaced):,} broken, others stand for them" if len(images.replaced) else ""
        yield f"  read with {manifest.options.said or 'no options'}{broken}"
        counts = Counter(images.labels().tolist())
        yield from (f"  {line}" for line in _lines(images, counts, manifest.classes, options))


def _lines(
    encoded: Listing | PackedImages, counts: Counter[int], names: Sequence[str], options: SourceOptions
) -> Iterator[str]:
    if counts.keys() - {NO_LABEL}:
        most = counts.most_common()
        named = [f"{_name(names, label)} {count:,}" for label, count in most[:_SHOWN]]
        yield f"classes, largest first: {', '.join(named)}{', …' * (len(most) > _SHOWN)}"
    number = len(encoded)
    sample = spread_evenly(number, _SAMPLE)
    images = DecodedImages(encoded, 1, options)
    intact, broken = images.facts(sample)
    of = f"of {len(sample):,} images that were decoded" + (", a sample" if len(sample) < number else "")
    if intact:
        sides = [min(one.width, one.height) for one in intact]
        yield f"shorter side {min(sides):,} to {max(sides):,} px, median {statistics.median(sides):,.0f} ({of})"
        kinds = Counter(f"{one.format} {one.mode}" for one in intact)
        yield f"formats and pixels: {', '.join(f'{kind} {count:,}' for kind, count in kinds.most_common(_SHOWN))}"
        yield from pixel_warnings(intact, options)
    if broken:
        estimate, limit = len(broken) * number // len(sample), options.limit_of_broken(number)
        after = f"runs and packs end at more than {limit:,}: --max-broken allows more"
        images.broken.list(broken)
        yield f"broken: {len(broken):,} {of}, about {estimate:,} in all; {after}; first {broken[0]}"
    yield from _duplicates(encoded)


def spread_evenly(number: int, most: int) -> Int64Array:
    """Up to `most` of the images 0..number-1, int64 [n], in ascending order."""
    return np.unique(np.linspace(0, number - 1, most).astype(np.int64))


def _name(names: Sequence[str], label: int) -> str:
    return "no label" if label == NO_LABEL else names[label] if names else str(label)


def pixel_warnings(images: list[ImageFacts], options: SourceOptions) -> Iterator[str]:
    """A line for pixels that may not be what they are taken for: 16 bits with few used, a fourth band as alpha."""
    deep = [one.largest for one in images if one.largest is not None]
    if deep and max(deep) < 1 << 15 and not options.pixel_range:
        yield (
            f"{len(deep):,} sampled images of 16 bits have values up to {max(deep):,} only, which are shown dark: "
            f"--pixel-range 0 {(1 << max(deep).bit_length()) - 1} uses their range"
        )
    if options.alpha != "ignore" and (bands := sum(one.fourth_band for one in images)):
        yield f"{bands:,} sampled TIFFs have a fourth band, which is taken for opacity: --alpha ignore if it is not"


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
