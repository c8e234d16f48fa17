"""Uploads packs that were made on a disk into a bucket, the manifest last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from trainer.data.index import damage_of_index
from trainer.data.manifest import LOCK, Manifest, Range, index_path, is_packed, manifests_in, tar_path
from trainer.data.pack_files import SEGMENT_BYTES
from weightserver.common.atomic_files import locked, sha256
from weightserver.common.object_store import (
    ObjectStoreError,
    Reason,
    create,
    digest_of,
    directly_below,
    read,
    remove,
    shown,
    unless_missing,
    upload,
)

CLAIM = ".claim"
"""The object by which a command keeps others from a place in a bucket, until the manifest does."""


@contextmanager
def claimed(target: Path, claim: bytes) -> Iterator[None]:
    """Keeps commands with another claim from `target` meanwhile, and after this one was killed.

    Raises:
        ValueError: another command packs there; a bucket that cannot be written.
    """
    if create(target / CLAIM, claim) != claim:
        raise ValueError(
            f"another command packs to {shown(target)}, or was killed: wait for it or repeat it, or remove "
            f"{shown(target / CLAIM)} if it is given up"
        )
    try:
        yield
    finally:
        with suppress(ObjectStoreError):
            remove([target / CLAIM])


def unclaim(target: Path, claim: bytes) -> None:
    """Removes a claim that a command has left which was killed; that of another command stays."""
    if unless_missing(lambda: read(target / CLAIM)) == claim:
        remove([target / CLAIM])


def upload_pack(directory: Path, target: Path) -> None:
    """Uploads a finished pack, with that of its test images. What an earlier call has uploaded is not sent again,
    unless it is missing or has another length now.

    Raises:
        ValueError: a pack that is not finished, or is damaged; a bucket that refuses or does not answer, holds another
            pack, or has something else than was sent; another command that packs there.
        OSError: another process packs into the directory.
    """
    with locked(directory / LOCK, wait=False):
        manifests = manifests_in(directory)
        if unfinished := [here for here, manifest in manifests.items() if not manifest.complete]:
            raise ValueError(
                f"{unfinished[0]} is not finished: repeat the command that packs it; 'pic pack merge' joins parts"
            )
        with claimed(target, manifests[directory].plan.encode()):
            places = {here: target / here.relative_to(directory) for here in manifests}
            befores = {here: _uploaded(here, manifests[here], there) for here, there in places.items()}
            if directory / "test" not in manifests and is_packed(target / "test"):
                raise ValueError(f"{shown(target)} holds test images, {directory} has none: give another place")
            for here, manifest in reversed(manifests.items()):
                _upload(here, manifest, places[here], befores[here])


def _uploaded(here: Path, manifest: Manifest, there: Path) -> Manifest:
    """What a bucket has of a pack: its manifest, or one without ranges. Raises ValueError if it has another pack."""
    before = Manifest.load(there) if is_packed(there) else replace(manifest, ranges=())
    if (before.order_seed, before.ranges) != (manifest.order_seed, manifest.ranges[: len(before.ranges)]):
        raise ValueError(f"{shown(there)} holds another pack than {here}: give another place")
    return before


def _upload(here: Path, manifest: Manifest, there: Path, before: Manifest) -> None:
    for part, target, digest in absent(there, manifest):
        path = here / target.name
        is_index = path == index_path(here, part.first)
        if any(damage_of_index(path, part)) if is_index else sha256(path) != digest:
            raise ValueError(f"{path} is damaged: pack the images again, into a new directory")
        send(path, target, digest)
    if before != manifest:
        upload(here / "manifest.json", there / "manifest.json")


def send(path: Path, target: Path, digest: str) -> None:
    """Uploads a file of a pack with its SHA-256 or, of an index, `index_digest`, and reads that back.

    Raises:
        ObjectStoreError: a bucket that refuses or does not answer, or has something else than was sent.
    """
    upload(path, target, sha256=digest, segment_bytes=SEGMENT_BYTES)
    if digest_of(target) != digest:
        raise ObjectStoreError(target, Reason.DAMAGED)


def lost_tars(there: Path, manifest: Manifest) -> list[Path]:
    """The tars that a bucket lacks, or has with another length; asks it for one list."""
    lengths = {one.path: one.bytes for one in directly_below(there)}
    tars = {tar_path(there, shard.first): shard.bytes for shard in manifest.shards}
    return [path for path, length in tars.items() if lengths.get(path) != length]


def absent(there: Path, manifest: Manifest) -> Iterator[tuple[Range, Path, str]]:
    """Range, place and SHA-256 of each file that a bucket lacks, or has with another length or another note."""
    lost = set(lost_tars(there, manifest))
    for part in manifest.ranges:
        for path, digest in part.digests(there).items():
            if path in lost or digest_of(path) != digest:
                yield part, path, digest
