"""Looks into the images of a source: classes, sizes, duplicates, broken images, pixels; for `pic inspect`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from trainer.data.config import SourceOptions
from trainer.data.decode import ImageFacts
from trainer.data.decoded_images import DecodedImages
from trainer.data.listing import NO_LABEL
from trainer.data.manifest import Manifest, is_packed
from trainer.data.reading import Split, read_source
from weightserver.core.arrays import Int64Array

_SAMPLE = 1_000
_SHOWN = 10


def inspect_source(source: Path, options: SourceOptions) -> Iterator[str]:
    """Lines about a source: its reading, then for each split what its images are, of a sample of up to 1,000.

    Raises:
        ValueError: a source that cannot be read, or has no images.
    """
    if is_packed(source):
        manifest = Manifest.load(source)
        yield f"{source}: a pack of {manifest.num_images:,} images"
        yield from (f"{part.count:,} images of {part.source}" for part in manifest.ranges)
        yield "to see the images, inspect what they were packed from"
        return
    reading = read_source(source, options)
    yield f"{source}"
    yield from (f"  {line}" for line in reading.lines())
    for split in reading.splits:
        yield f"{split.name or 'images'}:"
        yield from (f"  {line}" for line in _split_lines(split, options))


def _split_lines(split: Split, options: SourceOptions) -> Iterator[str]:
    if split.labelled:
        most = split.counts.most_common()
        named = [f"{_name(split, label)} {count:,}" for label, count in most[:_SHOWN]]
        yield f"classes, largest first: {', '.join(named)}{', …' * (len(most) > _SHOWN)}"
    number = len(split.listing)
    sample = spread_evenly(number, _SAMPLE)
    images = DecodedImages(split.listing, 1, options)
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
    yield from _duplicates(split)


def spread_evenly(number: int, most: int) -> Int64Array:
    """Up to `most` of the images 0..number-1, int64 [n], in ascending order."""
    return np.unique(np.linspace(0, number - 1, most).astype(np.int64))


def _name(split: Split, label: int) -> str:
    return "no label" if label == NO_LABEL else split.classes[label] if split.classes else str(label)


def pixel_warnings(images: list[ImageFacts], options: SourceOptions) -> Iterator[str]:
    """A line for pixels that may not be what they are taken for: 16 bits with few used, a fourth band as alpha."""
    deep = [one.largest for one in images if one.largest is not None]
    if deep and max(deep) < 1 << 15 and not options.pixel_range:
        yield (
            f"{len(deep):,} sampled images of 16 bits have values up to {max(deep):,} only, which are shown dark: "
            f"--pixel-range 0 {(1 << max(deep).bit_length()) - 1} uses their range"
        )
    if options.alpha == "show" and (bands := sum(one.fourth_band for one in images)):
        yield f"{bands:,} sampled TIFFs have a fourth band, which is taken for opacity: --alpha ignore if it is not"


def _duplicates(split: Split) -> Iterator[str]:
    """A line if files have the same bytes; only files of one length are read."""
    listing = split.listing
    lengths: dict[int, list[int]] = {}
    for image, entry in enumerate(listing.entries()):
        try:
            lengths.setdefault(listing.length(entry), []).append(image)
        except OSError:
            continue  # it counts as broken
    copies, first = 0, ""
    for images in lengths.values():
        known: dict[int, int] = {}
        for image in images if len(images) > 1 else ():
            try:
                original = known.setdefault(xxhash.xxh3_64_intdigest(listing.read(image)), image)
            except OSError:
                continue  # it counts as broken
            if original != image:
                copies += 1
                first = first or f"{listing[image].name} of {listing[original].name}"
    if copies:
        yield f"duplicates by bytes: {copies:,}, first {first}; each trains as an image of its own"
