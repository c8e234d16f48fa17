"""Plans a pack: lists the images of a source once and gives them the ids after the existing ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trainer.data.listing import Listing
from trainer.data.manifest import Manifest, Range, is_packed, listing_path
from trainer.data.reading import Split, kind_of_labels
from weightserver.common.atomic_files import atomic_write

_SHARD_BYTES = 1 << 28


class PackRequest(Protocol):
    """Arguments of `pack`; see `PackOptions`."""

    @property
    def order_seed(self) -> int | None: ...

    @property
    def shard_bytes(self) -> int | None: ...

    @property
    def labelled(self) -> bool: ...

    @property
    def extend(self) -> bool: ...


def planned(split: Split | None, source: str, output: Path, request: PackRequest) -> Manifest:
    """The manifest to pack by: the existing one, with a new range if images are added.

    `split` is what `source` names; None if it does not exist any more.

    Raises:
        ValueError: a source without images, or a directory whose content contradicts `request`.
    """
    if not is_packed(output):
        if request.extend:
            raise ValueError(f"{output} holds no packed images to extend: omit --extend")
        if any(path.name.endswith((".tar", ".npy", ".json")) for path in output.iterdir()):
            raise ValueError(f"{output} holds other files: give an empty or new directory")
        size = _SHARD_BYTES if request.shard_bytes is None else request.shard_bytes
        empty = Manifest(order_seed=request.order_seed or 0, shard_bytes=size, classes=(), ranges=())
        return _with_new_range(empty, split, source, output)
    manifest = Manifest.load(output)
    if request.order_seed not in (None, manifest.order_seed):
        raise ValueError(
            f"{output} is packed in the order of seed {manifest.order_seed}, not {request.order_seed}: "
            f"give --order-seed {manifest.order_seed}, or another directory"
        )
    if request.shard_bytes not in (None, manifest.shard_bytes):
        raise ValueError(
            f"{output} has tars of up to {manifest.shard_bytes:,} bytes, not {request.shard_bytes:,}: "
            "omit --shard-mib, or give another directory"
        )
    last = manifest.ranges[-1]
    if last.source != source and (not manifest.complete or not request.extend):
        do = "give --extend to add these" if manifest.complete else "finish packing those first"
        raise ValueError(f"{output} holds images of {last.source}: {do}, or give another directory")
    if not request.labelled and manifest.labelled:
        raise ValueError(f"{output} keeps labels: omit --no-labels, or give another directory")
    if request.labelled and not last.labelled and split and split.labelled:
        raise ValueError(f"{output} keeps no labels: give --no-labels, or another directory")
    if manifest.complete and request.extend:
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
