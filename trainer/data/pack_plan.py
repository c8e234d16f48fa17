"""Plans a pack: lists the images of a source once and gives them the ids after the existing ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.cores import usable_cores
from trainer.data.config import SourceOptions
from trainer.data.listing import Listing
from trainer.data.manifest import Manifest, Range, is_packed, listing_path
from trainer.data.reading import Split, kind_of_labels
from weightserver.common.atomic_files import atomic_write

_SHARD_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How to pack images."""

    order_seed: int | None = None
    """Seed of the order of the images; training needs the same one. Default: that of the pack so far, or 0."""
    shard_bytes: int | None = None
    """Maximum size of a tar, unless it holds a single image. Default: that of the pack so far, or 256 MiB."""
    labelled: bool = True
    """Whether to keep the source's labels, if any."""
    source: SourceOptions = field(default_factory=SourceOptions)
    """How to read the source where it can be read in several ways."""
    extend: bool = False
    """Whether to add those of the source's images that are not packed yet."""
    threads: int = field(default_factory=usable_cores)
    """Reading and decoding threads; default: one per core that this process may use."""

    def __post_init__(self) -> None:
        if (self.shard_bytes is not None and self.shard_bytes < 1) or self.threads < 1:
            raise ValueError("the size of tars and the number of threads must be at least 1")


def planned(split: Split | None, source: str, output: Path, options: PackOptions) -> Manifest:
    """The manifest to pack by: the existing one, with a new range if images are added.

    `split` is what `source` names; None if it does not exist any more.

    Raises:
        ValueError: a source without images, or a directory whose content contradicts `options`.
    """
    if not is_packed(output):
        if options.extend:
            raise ValueError(f"{output} holds no packed images to extend: omit --extend")
        if any(path.name.endswith((".tar", ".bin", ".json")) for path in output.iterdir()):
            raise ValueError(f"{output} holds other files: give an empty or new directory")
        size = _SHARD_BYTES if options.shard_bytes is None else options.shard_bytes
        empty = Manifest(
            order_seed=options.order_seed or 0, shard_bytes=size, classes=(), options=options.source, ranges=()
        )
        return _with_new_range(empty, split, source, output)
    manifest = Manifest.load(output)
    if options.order_seed not in (None, manifest.order_seed):
        raise ValueError(
            f"{output} is packed in the order of seed {manifest.order_seed}, not {options.order_seed}: "
            f"give --order-seed {manifest.order_seed}, or another directory"
        )
    if options.shard_bytes not in (None, manifest.shard_bytes):
        raise ValueError(
            f"{output} has tars of up to {manifest.shard_bytes:,} bytes, not {options.shard_bytes:,}: "
            "omit --shard-mib, or give another directory"
        )
    last = manifest.ranges[-1]
    if last.source != source and (not manifest.complete or not options.extend):
        do = "give --extend to add these" if manifest.complete else "finish packing those first"
        raise ValueError(f"{output} holds images of {last.source}: {do}, or give another directory")
    if not options.labelled and manifest.labelled:
        raise ValueError(f"{output} keeps labels: omit --no-labels, or give another directory")
    if options.labelled and not last.labelled and split and split.labelled:
        raise ValueError(f"{output} keeps no labels: give --no-labels, or another directory")
    if manifest.complete and options.extend:
        return _with_new_range(manifest, split, source, output)
    return manifest


def _with_new_range(manifest: Manifest, split: Split | None, source: str, output: Path) -> Manifest:
    """Adds a range of the source's images that are in no range yet; without any, returns the manifest unchanged."""
    if split is None:
        raise ValueError(f"no such folder or list of images: {source}")
    kind = kind_of_labels(manifest.labelled, manifest.classes)
    if manifest.ranges and split.kind_of_labels != kind:
        raise ValueError(
            f"{source} has {split.kind_of_labels}, {output} {kind}: add images of the same kind, or pack them "
            "separately"
        )
    listing, known = split.listing, _known(manifest, output)
    new = [entry for key, entry in zip(listing.hashes(), listing.entries(), strict=True) if key not in known]
    if not new:
        return manifest
    first = manifest.num_images

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.writelines(entry.line() for entry in new)

    atomic_write(listing_path(output, first), write)
    root = str(listing.root)
    part = Range(first=first, count=len(new), source=source, root=root, labelled=split.labelled, shards=())
    manifest = replace(manifest, classes=split.classes, ranges=(*manifest.ranges, part))
    manifest.save(output)
    return manifest


def _known(manifest: Manifest, output: Path) -> set[int]:
    """Hashes of all images that have ids."""
    known = set[int]()
    for part in manifest.ranges:
        known.update(Listing.open(listing_path(output, part.first), Path(part.root)).hashes())
    return known
