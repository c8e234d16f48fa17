"""Packs for a bucket: they are packed on a disk, the cache's or another, and then uploaded, the manifest last."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.data.config import SourceOptions
from trainer.data.manifest import Manifest, Range, index_path, is_packed, listing_path, packs_in, tar_path
from trainer.data.pack import damage_of_index
from trainer.data.pack_files import SEGMENT_BYTES
from trainer.data.pack_parts import LOCK, locked
from weightserver.common.atomic_files import atomic_write, directory_lock, make_directory, sha256
from weightserver.common.object_store import (
    ObjectStoreError,
    Reason,
    copy_range,
    create,
    digest_of,
    directly_below,
    find,
    remove,
    shown,
    upload,
)

CLAIM = ".claim"
"""The object by which a command that packs to a place in a bucket keeps others from it."""


@contextmanager
def staging(target: Path, options: SourceOptions, *, extend: bool = False) -> Iterator[Path]:
    """Yields where a pack for a bucket is packed before it is uploaded, while `claimed`; to extend it, with what a pack
    there has apart from its tars.

    Raises:
        ValueError, OSError: no --cache-dir, a bucket with another pack than this place, or as `claimed`.
    """
    place = options.in_cache("packs", *target.parts[1:])
    if is_packed(target) and not Manifest.load(target).complete:
        raise ValueError(
            f"{shown(target)} is being packed in parts: then 'pic pack merge {shown(target)} --cache-dir DIR'"
        )
    if is_packed(target) and not extend and not is_packed(place):
        raise ValueError(f"{shown(target)} holds a pack: give --extend to add images, or another place")
    with claimed(target, place):
        for there in packs_in(target)[::-1] if extend else ():
            _fetch(there, place / there.relative_to(target))
        yield place


@contextmanager
def claimed(target: Path, place: Path) -> Iterator[Path]:
    """Yields the directory from which a pack is uploaded. Meanwhile no other command packs to `target`; after one that
    was killed, only one from there.

    Raises:
        ValueError: a bucket that cannot be written, or another command that packs to `target`.
        OSError: another process that packs to `target` from this directory.
    """
    claim, folder = target / CLAIM, place.with_name(f".{place.name}.claim")
    token = folder / "token"
    with directory_lock(folder):
        if not token.exists():
            atomic_write(token, lambda path: path.write_bytes(os.urandom(16).hex().encode()))
        mine = token.read_bytes()
        if create(claim, mine) != mine:
            token.unlink()
            raise claimed_by_another(target)
        try:
            yield place
        finally:
            with suppress(ObjectStoreError):
                remove([claim])
                token.unlink()


def claimed_by_another(target: Path) -> ValueError:
    return ValueError(
        f"another command packs to {shown(target)}, or was killed: wait for it or repeat it where it ran, or "
        f"remove {shown(target / CLAIM)} if it is given up"
    )


def upload_pack(directory: Path, target: Path) -> None:
    """Uploads a finished pack, with that of its test images. What an earlier call has uploaded is not sent again,
    unless it is missing or has another length now.

    Raises:
        ValueError: a pack that is not finished, or is damaged; a bucket that refuses or does not answer, holds another
            pack, or has something else than was sent.
        OSError: another process packs into the directory.
    """
    with locked(directory / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB):
        manifests = {here: Manifest.load(here) for here in reversed(packs_in(directory))}
        if unfinished := [here for here, manifest in manifests.items() if not manifest.complete]:
            raise ValueError(
                f"{unfinished[0]} is not finished: repeat the command that packs it; 'pic pack merge' joins parts"
            )
        for here, manifest in manifests.items():
            _upload(here, manifest, target / here.relative_to(directory))


def _fetch(there: Path, here: Path) -> None:
    """Copies listings, indexes and manifest of a pack in a bucket, as far as they are not here."""
    manifest = Manifest.load(there)
    known = Manifest.load(here).ranges if is_packed(here) else ()
    if known[: len(manifest.ranges)] == manifest.ranges:
        return  # perhaps with images that are being added
    if known != manifest.ranges[: len(known)]:
        raise ValueError(f"{shown(there)} holds another pack than {here}: give another place, or remove that")
    make_directory(here)
    for part in manifest.ranges[len(known) :]:
        for path in (listing_path(there, part.first), index_path(there, part.first)):
            atomic_write(here / path.name, partial(_copy, path, part.digests(there)[path]))
        if sha256(listing_path(here, part.first)) != part.listing_sha256:
            raise ObjectStoreError(listing_path(there, part.first), Reason.DAMAGED)
        if any(damage_of_index(index_path(here, part.first), part)):
            raise ObjectStoreError(index_path(there, part.first), Reason.DAMAGED)
    manifest.save(here)


def _copy(path: Path, digest: str, target: Path) -> None:
    if (found := find(path)) is None:
        raise ObjectStoreError(path, Reason.MISSING)
    with target.open("wb") as file:
        copy_range(path, 0, found.bytes, file, sha256=digest)


def verify_in_bucket(directory: Path) -> list[str]:
    """Compares lengths of tars, and the SHA-256 that uploads noted, with a manifest; returns a line for each file that
    differs. Reads no tar."""
    manifest = Manifest.load(directory)
    if not manifest.complete:
        return [f"{shown(directory)} is not finished: pack its parts, then 'pic pack merge' joins them"]
    return [
        f"{shown(path)} is missing or does not match its checksum: remove it and upload the pack again"
        for _, path, _ in _absent(directory, manifest)
    ]


def _upload(here: Path, manifest: Manifest, there: Path) -> None:
    before = Manifest.load(there) if is_packed(there) else replace(manifest, ranges=())
    num_before = len(before.ranges)
    if (before.order_seed, before.ranges) != (manifest.order_seed, manifest.ranges[:num_before]):
        raise ValueError(f"{shown(there)} holds another pack than {here}: give another place")
    for part, target, digest in _absent(there, manifest, num_before):
        path = here / target.name
        if not path.is_file():  # a tar that the pack had before it was extended here
            raise ObjectStoreError(target, Reason.MISSING)
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


def _absent(there: Path, manifest: Manifest, num_before: int = 0) -> Iterator[tuple[Range, Path, str]]:
    """Range, place and SHA-256 of each file that a bucket lacks, or has with another length or another note.

    Args:
        num_before: of the tars of so many ranges, which were compared before, only the length is compared.
    """
    lengths = {one.path.name: one.bytes for one in directly_below(there)}
    for number, part in enumerate(manifest.ranges):
        bytes_of = {tar_path(there, shard.first): shard.bytes for shard in part.shards}
        for path, digest in part.digests(there).items():
            length, compared = lengths.get(path.name), path in bytes_of and number < num_before
            if length != bytes_of.get(path, length) or not (compared or digest_of(path) == digest):
                yield part, path, digest
