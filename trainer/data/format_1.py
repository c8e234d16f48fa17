"""Packs of format 1, whose tars each have an index of their own, get the present form before anything is added to them.

Tars and lists of images stay as they are. The old indexes stay too, because a run may be reading them; nothing of the
present form does, and they may be deleted when no run of before is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.data.index import INDEX, create_index
from trainer.data.manifest import Manifest, Range, Shard, index_path, tar_index_path
from weightserver.common.atomic_files import sha256


def in_present_form(manifest: Manifest, directory: Path) -> Manifest:
    """Writes the indexes of the present form and returns the manifest that names them, to be saved.

    Raises:
        ValueError: an index is missing or damaged.
    """
    if not manifest.indexed_by_tar:
        return manifest
    ranges = tuple(_with_one_index(part, directory) for part in manifest.ranges)
    return replace(manifest, ranges=ranges, indexed_by_tar=False)


def _with_one_index(part: Range, directory: Path) -> Range:
    shards: list[Shard] = []

    def records() -> Iterator[bytes]:
        for shard in part.shards:
            path = tar_index_path(directory, shard.first)
            if not path.is_file() or sha256(path) != shard.index_sha256:
                raise ValueError(f"{path} is missing or damaged: pack the images again, into a new directory")
            content = np.load(path, allow_pickle=False).astype(INDEX).tobytes()
            shards.append(replace(shard, index_sha256=hashlib.sha256(content).hexdigest()))
            yield content

    create_index(index_path(directory, part.first), part.count, records())
    return replace(part, shards=tuple(shards))
