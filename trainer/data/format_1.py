"""Converts packs of format 1, in which each tar has its own index, to the present format before images are added.

Tars and lists of images are unchanged. The old indexes stay, because a run may be reading them; they may be deleted
once all runs that were started before have ended.
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
    """Writes indexes in the present format and returns the manifest that names them, to be saved.

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
