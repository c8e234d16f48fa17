"""Packs for a bucket: they are packed below --cache-dir and then uploaded, the manifest last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from trainer.data.config import SourceOptions
from trainer.data.manifest import Manifest, index_path, is_packed, listing_path, packs_in, shards_path, tar_path
from trainer.data.pack_files import SEGMENT_BYTES
from weightserver.common.atomic_files import atomic_write, directory_lock
from weightserver.common.object_store import (
    ObjectStoreError,
    create,
    digest_of,
    directly_below,
    remove,
    shown,
    upload,
)


@contextmanager
def staging(target: Path, options: SourceOptions) -> Iterator[Path]:
    """Yields where a pack for a bucket is packed before it is uploaded. Meanwhile no other command packs to `target`;
    after one that was killed, only that one again.

    Raises:
        ValueError: no --cache-dir, a bucket that cannot be written, or another command that packs to `target`.
        OSError: another process that packs to `target` from this --cache-dir.
    """
    place = options.in_cache("packs", *target.parts[1:])
    if is_packed(target) and not is_packed(place):
        raise ValueError(
            f"{shown(target)} holds a pack, and {place}, which extends it, is not there: give another place"
        )
    claim, folder = target / ".claim", place.with_name(f".{place.name}.claim")
    token = folder / "token"
    with directory_lock(folder):
        if not token.exists():
            atomic_write(token, lambda path: path.write_bytes(os.urandom(16).hex().encode()))
        mine = token.read_bytes()
        if create(claim, mine) != mine:
            token.unlink()
            raise ValueError(
                f"another command packs to {shown(target)}, or was killed: wait for it or repeat it where it ran, or "
                f"remove {shown(claim)} if it is given up"
            )
        try:
            yield place
        finally:
            with suppress(ObjectStoreError):
                remove([claim])
                token.unlink()


def upload_pack(directory: Path, target: Path) -> None:
    """Uploads a finished pack, with that of its test images. What an earlier call has uploaded is not sent again,
    unless it is missing or has another length now.

    Raises:
        ValueError: the bucket refuses or does not answer, or holds another pack.
    """
    for here in reversed(packs_in(directory)):
        _upload(here, target / here.relative_to(directory))


def _upload(here: Path, there: Path) -> None:
    manifest = Manifest.load(here)
    before = Manifest.load(there) if is_packed(there) else replace(manifest, ranges=())
    if (before.order_seed, before.ranges) != (manifest.order_seed, manifest.ranges[: len(before.ranges)]):
        raise ValueError(f"{shown(there)} holds another pack than {here}: give another place")
    lengths = {one.path.name: one.bytes for one in directly_below(there)}
    for number, part in enumerate(manifest.ranges):
        is_new = number >= len(before.ranges)
        for shard in part.shards:
            tar = tar_path(here, shard.first)
            is_there = lengths.get(tar.name) == shard.bytes
            if not is_there or (is_new and digest_of(there / tar.name) != shard.sha256):
                upload(tar, there / tar.name, sha256=shard.sha256, segment_bytes=SEGMENT_BYTES)
        index = index_path(here, part.first)
        for path in (index, listing_path(here, part.first), shards_path(here, part.first)):
            if is_new or lengths.get(path.name) != path.stat().st_size:
                digest = part.index_digest if path == index else ""
                upload(path, there / path.name, sha256=digest, segment_bytes=SEGMENT_BYTES)
    if before != manifest:
        upload(here / "manifest.json", there / "manifest.json")
