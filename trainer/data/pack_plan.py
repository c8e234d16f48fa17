"""Plans a pack: lists the images of a source once and gives them the ids after the existing ones."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from trainer.cores import usable_cores
from trainer.data.config import SourceOptions
from trainer.data.decoded_images import DecodedImages
from trainer.data.finished_tars import listing_of
from trainer.data.listing import NO_LABEL, Entry, Listing
from trainer.data.manifest import Manifest, Range, listing_path, manifests_in
from trainer.data.parts import WHOLE, Part
from trainer.data.reading import Split, kind_of_labels
from trainer.data.survey import checked_sample
from trainer.data.tables import IN_TABLE
from weightserver.common.atomic_files import atomic_write, sha256
from weightserver.common.logs import Remark, say
from weightserver.common.object_store import absolute, is_remote, shown

_MEASURED = 1_000


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How to pack images."""

    order_seed: int | None = None
    """Seed of the order of the images; training needs the same one. Default: that of the pack so far, or 0."""
    tar_bytes: int = 1 << 28
    """Size of a tar with images of the mean size: its number of rows follows from that."""
    source: SourceOptions = field(default_factory=SourceOptions)
    """How to read the source where it can be read in several ways."""
    extend: bool = False
    """Whether to add those of the source's images that are not packed yet."""
    part: Part | None = None
    """Which part of the rows to pack; None for all."""
    threads: int = field(default_factory=usable_cores)
    """Reading and decoding threads; default: one per core that this process may use."""

    def __post_init__(self) -> None:
        if self.tar_bytes < 1 or self.threads < 1:
            raise ValueError("the size of tars and the number of threads must be at least 1")


def planned(
    split: Split,
    before: Manifest | None,
    place: Path,
    output: Path,
    options: PackOptions,
    known: tuple[str, ...] = (),
) -> Manifest:
    """The manifest to pack a split by, which is not saved: the existing one, with a new range if images are added.

    Args:
        before: the existing one; if a range of it is not complete, that is packed first.
        place: of the pack.
        output: folder for a new listing.
        known: classes of the training images, whose numbers those of test images are.

    Raises:
        ValueError: a source without images, or a pack that contradicts `options`.
    """
    if before is None:
        if options.extend:
            raise _another(place, "holds no packed images to extend", "omit --extend")
        seed = options.order_seed or 0
        manifest = Manifest(order_seed=seed, labelled=split.labelled, classes=(), options=options.source, ranges=())
        return _with_range(manifest, split, split.listing, output, options, known)
    _check_options(before, place, options)
    _check_split(before, place, split)
    added = _added(split, before, place, options) if before.complete else None
    return _with_range(before, split, added, output, options, known) if added else before


def begun(source: Path, output: Path, options: PackOptions) -> dict[Path, Manifest]:
    """The manifests of a pack of `source` that is planned, by directory: its own, and that of its test images, if any.
    Empty if it is to be planned.

    Raises:
        ValueError: the pack is another one.
    """
    manifests = manifests_in(output)
    if not manifests:
        return {}
    joined = manifests.values() if options.part else (manifests[output],)  # which is planned last, and joined last
    if options.extend and all(manifest.complete for manifest in joined):
        return {}
    _check_options(manifests[output], output, options)
    last = manifests[output].ranges[-1]
    is_split = not is_remote(source) and last.source == str(absolute(source))
    if not is_split and not last.is_of(source):
        remedy = "give --extend to add these" if manifests[output].complete else "finish packing those first"
        raise _another(output, f"holds images of {last.source}", remedy)
    if options.extend and options.part in (None, WHOLE):  # by which a plan for Ray is made
        line = f"{last.source}: packing what was listed before; repeat --extend to add newer images"
        say(Remark(line, source=last.source))
    return manifests


def _another(place: Path, wrong: str, remedy: str) -> ValueError:
    """A place does not hold the pack that is asked for, or what can become it."""
    return ValueError(f"{shown(place)} {wrong}: {remedy}, or give another directory")


def _check_options(manifest: Manifest, place: Path, options: PackOptions) -> None:
    """Raises ValueError if a pack is not the one that is asked for."""
    if options.order_seed not in (None, manifest.order_seed):
        wrong = f"is packed in the order of seed {manifest.order_seed}, not {options.order_seed}"
        raise _another(place, wrong, f"give --order-seed {manifest.order_seed}")
    if differing := manifest.options.differing(options.source):
        raise _another(place, f"was packed with {differing}", "omit that")


def _check_split(manifest: Manifest, place: Path, split: Split) -> None:
    """Raises ValueError if images of a split cannot be added to a pack."""
    root = split.listing.root
    for part in manifest.ranges if is_remote(root) else ():  # before, ranges had the names of copies in --cache-dir
        cache, copy, _ = f"{part.root}/".partition(f"/sources/{root.parts[1]}/")
        if copy:
            wrong = f"may hold images of {shown(root)} already, by the name of their copy {part.root}"
            raise _another(place, wrong, f"replace {cache}/sources/ by s3:// in its manifest.json if it does")
    kind = kind_of_labels(manifest.labelled, manifest.classes)
    if split.kind_of_labels != kind:
        raise _another(place, f"has {kind}, {split.source} {split.kind_of_labels}", "add images of the same kind")


def _with_range(
    manifest: Manifest,
    split: Split,
    listing: Listing,
    output: Path,
    options: PackOptions,
    known: tuple[str, ...],
) -> Manifest:
    """Adds a range of new images of a split. Known classes keep their numbers.

    Raises:
        ValueError: as `checked_sample`.
    """
    checked_sample(DecodedImages(listing, 1, options.source, threads=options.threads))
    names = tuple(dict.fromkeys((*manifest.classes, *known, *split.classes))) if split.classes else ()
    number_of = {name: number for number, name in enumerate(names)}
    first = manifest.num_images

    def line(entry: Entry) -> bytes:
        if names and entry.label != NO_LABEL:
            entry = entry._replace(label=number_of[split.classes[entry.label]])
        return entry.line()

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.writelines(map(line, listing))

    atomic_write(listing_path(output, first), write)
    rows_per_tar = max(1, options.tar_bytes // _mean_bytes(listing))
    part = Range(
        first=first,
        count=len(listing),
        source=split.source,
        root=shown(listing.root),
        listing_sha256=sha256(listing_path(output, first)),
        rows_per_tar=rows_per_tar,
        shards=(),
    )
    return replace(manifest, classes=names, ranges=(*manifest.ranges, part))


def _added(split: Split, manifest: Manifest, pack: Path, options: PackOptions) -> Listing | None:
    """The images of a split that are not packed yet, by their paths; None if all are.

    Raises:
        ValueError: they are rows of a table that was rewritten, so that others have their numbers.
    """
    marks = dict[Path, int]()  # of tables

    def places() -> Iterator[bytes]:
        for part in manifest.ranges:
            listing = Listing.open(listing_of(pack, part, options.source), Path(part.root))
            for entry in listing:
                if entry.length == IN_TABLE:
                    marks[listing.root / entry.path] = entry.offset
                yield _place(listing, entry)

    packed: NDArray[np.bytes_] = np.fromiter(places(), "S16", manifest.num_images)
    packed.sort()
    content = BytesIO()
    for entry in split.listing:
        place = _place(split.listing, entry)
        if packed.searchsorted(place) == packed.searchsorted(place, "right"):
            if entry.length == IN_TABLE:
                path = split.listing.root / entry.path
                if marks.get(path, entry.offset) != entry.offset:
                    raise ValueError(
                        f"{shown(path)} was rewritten with more rows since it was packed, so any of them may be new: "
                        "put the earlier one back, and new images into a table of their own"
                    )
            content.write(entry.line())
    return Listing(content.getvalue(), split.listing.root, split.listing.place) if content.tell() else None


def _place(listing: Listing, entry: Entry) -> bytes:
    """A hash, of 16 bytes, of where an image is."""
    return xxh3_128_digest(os.fsencode(f"{listing.root / entry.path}\0{entry.member}"))


def _mean_bytes(images: Listing) -> int:
    """The mean size of an image in a tar, with its headers and label, estimated from a thousand of the images or so."""
    sizes = []
    for image in range(0, len(images), 1 + len(images) // _MEASURED):
        with suppress(OSError):
            blocks = 2 if images[image].label == NO_LABEL else 4
            sizes.append(images.length(images[image]) + blocks * tarfile.BLOCKSIZE)
    return sum(sizes) // len(sizes) if sizes else 1
