"""The index of a range of packed rows: a file of records without a header; each finished tar adds its own."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from weightserver.common.atomic_files import atomic_write, sync

INDEX = np.dtype([("offset", "<i8"), ("length", "<i8"), ("image", "<i8"), ("shown", "<i8"), ("label", "<i8")])
"""One record per row: where its image's bytes are in the tar, the image's id, the id of the image that is shown
(another one if the image is broken), and the image's own class (−1 without a label)."""


def cut_index(path: Path, num_packed: int) -> None:
    """Truncates an index to its first `num_packed` records, before others are added.

    Raises:
        ValueError: the index has fewer records.
    """
    if num_packed == 0 and not path.exists():
        atomic_write(path, lambda partial: None)
    size = num_packed * INDEX.itemsize
    if path.stat().st_size < size:
        raise ValueError(f"{path} is cut off: pack the images again, into a new directory")
    os.truncate(path, size)
    sync(path)


def check_index(path: Path, count: int) -> None:
    """Raises ValueError unless an index has `count` records."""
    if not path.is_file() or path.stat().st_size != count * INDEX.itemsize:
        raise ValueError(f"{path} is not the index of {count} rows: pack the images again, into a new directory")


def read_records(path: Path, start: int, stop: int) -> bytes:
    """Reads records start … stop−1 of an index, as far as they exist."""
    with path.open("rb") as file:
        file.seek(start * INDEX.itemsize)
        return file.read((stop - start) * INDEX.itemsize)
