"""The index of a range of packed rows: an .npy file of records; each finished tar adds its own."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weightserver.common.atomic_files import append_synced, atomic_write, sync

INDEX = np.dtype([("offset", "<i8"), ("length", "<i8"), ("image", "<i8"), ("shown", "<i8"), ("label", "<i8")])
"""One record per row: where its image's bytes are in the tar, the image's id, the id of the image that is shown
(another one if the image is broken), and the class of the image that is shown (−1 without labels)."""


def create_index(path: Path, count: int, records: Iterable[bytes] = ()) -> None:
    """Writes the index of a range of `count` rows, with the records so far."""

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            file.write(_header(count))
            file.writelines(records)

    atomic_write(path, write)


def add_records(path: Path, records: NDArray[np.void]) -> str:
    """Appends the records of a tar, `INDEX` [n], and syncs them; returns their SHA-256."""
    content = records.tobytes()
    append_synced(path, content)
    return hashlib.sha256(content).hexdigest()


def cut_index(path: Path, count: int, num_packed: int) -> None:
    """Truncates an index of `count` rows to its first `num_packed` records, before others are added.

    Raises:
        ValueError: the index has fewer records.
    """
    if num_packed == 0 and not path.exists():
        create_index(path, count)
    size = _records_start(path, count) + num_packed * INDEX.itemsize
    if path.stat().st_size < size:
        raise ValueError(f"{path} is cut off: pack the images again, into a new directory")
    os.truncate(path, size)
    sync(path)


def map_index(path: Path, count: int) -> NDArray[np.void]:
    """Maps the records of an index of `count` rows, `INDEX` [count], without reading them yet.

    Raises:
        ValueError: it cannot be read, or is not the index of that many rows.
    """
    try:
        index: NDArray[np.void] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): pack the images again, into a new directory") from None
    if index.dtype != INDEX or index.shape != (count,):
        raise ValueError(f"{path} is not the index of {count} rows: pack the images again, into a new directory")
    return index


def read_records(path: Path, count: int, start: int, stop: int) -> bytes:
    """Reads records start … stop−1 of an index of `count` rows, as far as they exist.

    Raises:
        ValueError: it cannot be read, or is not the index of that many rows.
    """
    start, stop = (_records_start(path, count) + record * INDEX.itemsize for record in (start, stop))
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _header(count: int) -> bytes:
    """Header of an .npy file of `count` records."""
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(INDEX)
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": (count,)})
    return header.getvalue()


def _records_start(path: Path, count: int) -> int:
    """Size in bytes of the header of an index of `count` rows."""
    header = _header(count)
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(header)) == header:
            return len(header)
    raise ValueError(f"{path} is not the index of {count} rows: pack the images again, into a new directory")
