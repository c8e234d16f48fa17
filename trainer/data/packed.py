"""Reads packed images: any row or image by its position, and a window of rows as the contiguous bytes that it is."""

from __future__ import annotations

import functools
import logging
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.index import INDEX, map_index
from trainer.data.manifest import Manifest, Range, Shard, index_path, tar_index_path, tar_path
from trainer.schedule import RangesOrder
from weightserver.core.arrays import Int64Array

_log = logging.getLogger(__name__)
_OPEN_FILES = 256
_OPEN_INDEXES = 64
_SEGMENT_BYTES = 1 << 23
"""What is read ahead where rows are asked for."""
_ADVICE_BYTES = 1 << 17
"""Linux reads no more ahead for one piece of advice than a device's read-ahead."""
_REMEMBERED_SEGMENTS = 1 << 11


class PackedImages:
    """The images of a packed directory, encoded, by id or by row. Thread-safe.

    The window moves over contiguous rows, so the second row of a segment of 8 MiB that is asked for has the whole
    segment read ahead, sequentially; the system's cache keeps it while the window lies there. Indexes are mapped when
    they are first read. However many tars and ranges there are, few are open: at most a fifth of the files that the
    process may open, and one more for each thread that reads. Images that are being added are not there until all of
    them are.

    Raises:
        ValueError: no packed images, not all of the first range, or an index that does not fit the manifest.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        manifest = Manifest.load(directory, substitutes=False)
        self.manifest = manifest.finished
        if not self.manifest.ranges:
            raise ValueError(f"{directory} is not packed to its end: repeat the command that packs it")
        if not manifest.complete:
            added = manifest.num_images - len(self)
            _log.warning(
                "%s without %d images that are being added: repeat the command that adds them", directory, added
            )
        self.order = RangesOrder(self.manifest.sizes, self.manifest.order_seed)
        self._firsts = np.array([shard.first for shard in self.manifest.shards])
        self._ends = np.append(self._firsts[1:], len(self))
        by_tar = self.manifest.indexed_by_tar
        indexed: Sequence[Shard | Range] = self.manifest.shards if by_tar else self.manifest.ranges
        self._index_firsts = np.array([part.first for part in indexed])
        self._index_counts = [part.count for part in indexed]
        self._index_path = tar_index_path if by_tar else index_path
        self._check_indexes()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._map_index = functools.lru_cache(_share(limit, 16, _OPEN_INDEXES))(map_index)
        self._open = functools.lru_cache(_share(limit, 8, _OPEN_FILES))(_Descriptor)
        self._segments: OrderedDict[tuple[int, int], bool] = OrderedDict()  # whether they are read ahead by now
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.manifest.num_images

    def read(self, image: int) -> bytes:
        """The encoded bytes that stand for image 0..N-1. Raises OSError where they cannot be read."""
        return self.read_row(int(self.order.rows(np.array([image]))[0]))

    def read_row(self, row: int) -> bytes:
        """The encoded bytes of row 0..N-1. Raises OSError where they cannot be read."""
        shard = self._shard(row)
        (record,) = self._records(row, row + 1)
        path = tar_path(self.directory, int(self._firsts[shard]))
        file = self._open(path)
        offset, length = int(record["offset"]), int(record["length"])
        self._read_ahead(file, shard, offset // _SEGMENT_BYTES)
        return _pread(file, length, offset, path)

    def rows(self, start: int, stop: int) -> Iterator[bytes]:
        """The encoded bytes of rows start … stop−1 one after another, as of a window: read in pieces of about 8 MiB.

        Raises IndexError for rows that are not there, OSError where they cannot be read.
        """
        while start < stop:
            shard = self._shard(start)
            first = int(self._firsts[shard])
            index = self._records(start, min(stop, int(self._ends[shard])))
            ends = index["offset"] + index["length"]
            begin = int(index["offset"][0])
            together = max(1, int(np.searchsorted(ends, begin + _SEGMENT_BYTES)))
            path = tar_path(self.directory, first)
            content = memoryview(_pread(self._open(path), int(ends[together - 1]) - begin, begin, path))
            for offset, end in zip(index["offset"][:together].tolist(), ends[:together].tolist(), strict=True):
                yield bytes(content[offset - begin : end - begin])
            start += together

    def positions(self, images: Int64Array) -> Int64Array:
        """The rows of images, both int64 [n]: in their order they lie on the disk."""
        return self.order.rows(images)

    def name(self, image: int) -> str:
        """What a message calls an image."""
        row = int(self.order.rows(np.array([image]))[0])
        shard = self._shard(row)
        return f"row {row} in {tar_path(self.directory, int(self._firsts[shard]))}"

    def shown(self) -> Int64Array:
        """The id of the image that stands for each image, int64 [N]: another one where that is broken."""
        return self._by_image("shown")

    def labels(self) -> Int64Array:
        """The class of each image, int64 [N]; −1 without one."""
        return self._by_image("label")

    def _by_image(self, field: str) -> Int64Array:
        values, found = np.empty(len(self), np.int64), np.zeros(len(self), bool)
        limit = {"shown": len(self), "label": len(self.manifest.classes) or np.iinfo(np.int64).max}[field]
        for shard in self.manifest.shards:
            records = self._records(shard.first, shard.first + shard.count)
            images, of_images = records["image"], records[field]
            if (images.astype(np.uint64) >= len(self)).any() or (of_images < -1).any() or (of_images >= limit).any():
                raise self._damaged(shard.first)
            values[images] = of_images
            found[images] = True
        if not found.all():
            raise self._damaged(self.manifest.shards[0].first)
        return values

    def _damaged(self, row: int) -> ValueError:
        return ValueError(
            f"the index of {self.directory} is damaged, in the records from row {row} on: "
            "'python -m trainer.data verify' names what differs; pack the images again, into a new directory"
        )

    def _shard(self, row: int) -> int:
        """The number of the tar that a row is in."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is none of 0..{len(self) - 1}")
        return int(np.searchsorted(self._firsts, row, side="right")) - 1

    def _records(self, start: int, stop: int) -> NDArray[np.void]:
        """The records of rows start … stop−1, all of one tar."""
        number = int(np.searchsorted(self._index_firsts, start, side="right")) - 1
        first = int(self._index_firsts[number])
        index = self._map_index(self._index_path(self.directory, first), self._index_counts[number])
        return index[start - first : stop - first]

    def _check_indexes(self) -> None:
        """By their sizes alone; an index is read when its rows are."""
        for first, count in zip(self._index_firsts.tolist(), self._index_counts, strict=True):
            path = self._index_path(self.directory, first)
            header = path.stat().st_size - count * INDEX.itemsize if path.is_file() else 0
            if header <= 0 or header % np.lib.format.ARRAY_ALIGN:
                raise ValueError(
                    f"{path} is not the index of {count} rows: pack the images again, into a new directory"
                )

    def _read_ahead(self, file: _Descriptor, shard: int, segment: int) -> None:
        """Has the rest of a segment read when a second row of it is asked for: of rows in random order few are."""
        with self._lock:
            asked_for = self._segments.get((shard, segment))
            self._segments[shard, segment] = asked_for is not None
            if len(self._segments) > _REMEMBERED_SEGMENTS:
                self._segments.popitem(last=False)
        if asked_for is False and hasattr(os, "posix_fadvise"):
            for start in range(segment * _SEGMENT_BYTES, (segment + 1) * _SEGMENT_BYTES, _ADVICE_BYTES):
                os.posix_fadvise(file.number, start, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)


def _pread(file: _Descriptor, length: int, offset: int, path: Path) -> bytes:
    content = os.pread(file.number, length, offset)
    if len(content) != length:
        raise OSError(f"{path} is cut off")
    return content


def _share(limit: int, parts: int, most: int) -> int:
    """How many files of a kind to keep open where a process may open `limit`; at most `most`."""
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // parts))


class _Descriptor:
    """A file open for reading until nobody holds this any more."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
