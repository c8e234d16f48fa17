"""The index of a range of packed rows: a file of records without a header."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer.data.manifest import Range

INDEX = np.dtype([("offset", "<i8"), ("length", "<i8"), ("image", "<i8"), ("shown", "<i8"), ("label", "<i8")])
"""One record per row: where its image's bytes are in the tar, the image's id, the id of the image that is shown
(another one if the image is broken), and the image's own class (−1 without a label)."""


def check_index(path: Path, count: int) -> None:
    """Raises ValueError unless an index has `count` records."""
    if not path.is_file() or path.stat().st_size != count * INDEX.itemsize:
        raise ValueError(f"{path} is not the index of {count} rows: pack the images again, into a new directory")


def damage_of_index(index: Path, part: Range) -> Iterator[str]:
    """A line for each tar whose records in the index of its range differ from the manifest's checksum."""
    with index.open("rb") as file:
        for shard in part.shards:
            if hashlib.sha256(file.read(shard.count * INDEX.itemsize)).hexdigest() != shard.index_sha256:
                yield f"{index} is damaged in rows {shard.first}..{shard.first + shard.count - 1}"
