"""Plans a pack: lists the images of a source once and gives them the ids after the existing ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trainer.data.listing import ImageSource, Listing, image_hash, kind_of_labels, listing_lines
from trainer.data.manifest import Manifest, Range, is_packed, listing_path
from trainer.data.tree import LeftOut
from weightserver.common.atomic_files import atomic_write
from weightserver.common.logs import Remark

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

    @property
    def on_broken(self) -> Callable[[Remark], None]: ...


def planned(source: Path, output: Path, request: PackRequest) -> Manifest:
    """The manifest to pack by: the existing one, with a new range if images are added.

    Raises:
        ValueError: a source without images, or a directory whose content contradicts `request`.
    """
    source = source.resolve()
    if is_packed(source):
        raise ValueError(f"{source} holds packed images: give the folder or list of images that they came from")
    if not is_packed(output):
        if request.extend:
            raise ValueError(f"{output} holds no packed images to extend: omit --extend")
        if any(path.name.endswith((".tar", ".npy", ".json")) for path in output.iterdir()):
            raise ValueError(f"{output} holds other files: give an empty or new directory")
        size = _SHARD_BYTES if request.shard_bytes is None else request.shard_bytes
        empty = Manifest(order_seed=request.order_seed or 0, shard_bytes=size, classes=(), ranges=())
        return _with_new_range(empty, source, output, request)
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
    if last.source != str(source) and (not manifest.complete or not request.extend):
        do = "give --extend to add these" if manifest.complete else "finish packing those first"
        raise ValueError(f"{output} holds images of {last.source}: {do}, or give another directory")
    if not request.labelled and manifest.labelled:
        raise ValueError(f"{output} keeps labels: omit --no-labels, or give another directory")
    if request.labelled and not last.labelled and source.exists() and ImageSource(source).labelled:
        raise ValueError(f"{output} keeps no labels: give --no-labels, or another directory")
    if manifest.complete and request.extend:
        return _with_new_range(manifest, source, output, request)
    return manifest


def _with_new_range(manifest: Manifest, source: Path, output: Path, request: PackRequest) -> Manifest:
    """Adds a range of the source's images that are in no range yet; without any, returns the manifest unchanged."""
    found = ImageSource(source, labelled=request.labelled, classes=manifest.classes)
    kind = kind_of_labels(manifest.labelled, manifest.classes)
    if manifest.ranges and found.kind != kind:
        raise ValueError(
            f"{source} has {found.kind}, {output} {kind}: add images of the same kind, or pack them separately"
        )
    known = _known(manifest, output)
    first, count, left_out = manifest.num_images, 0, LeftOut()

    def write(path: Path) -> None:
        nonlocal count
        with path.open("wb") as file:
            entries = found.entries(left_out)
            new = (entry for entry in entries if image_hash(found.root / entry.path, entry.member) not in known)
            for count, line in enumerate(listing_lines(new, left_out), 1):  # noqa: B007 - their number is used below
                file.write(line)

    atomic_write(listing_path(output, first), write)
    if line := left_out.line(source):
        request.on_broken(line)
    if count == 0:
        listing_path(output, first).unlink()
        if manifest.ranges:
            return manifest
        raise ValueError(f"no images in {source}: give a folder or a list of images")
    part = Range(first=first, count=count, source=str(source), root=str(found.root), labelled=found.labelled, shards=())
    manifest = replace(manifest, classes=tuple(found.classes), ranges=(*manifest.ranges, part))
    manifest.save(output)
    return manifest


def _known(manifest: Manifest, output: Path) -> set[int]:
    """Hashes of all images that have ids."""
    known = set()
    for part in manifest.ranges:
        listing = Listing.open(listing_path(output, part.first), Path(part.root))
        known |= {image_hash(Path(part.root) / entry.path, entry.member) for entry in listing.entries()}
    return known
