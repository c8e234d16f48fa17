"""Reads packed images: any row or image by its number, and a window of rows as contiguous bytes."""

from __future__ import annotations

import functools
import logging
import os
import resource
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.index import check_index, map_index
from trainer.data.listing import Listing
from trainer.data.manifest import Manifest, index_path, listing_path, tar_path
from weightserver.core.arrays import Int64Array
from weightserver.torch import RangesOrder

_log = logging.getLogger(__name__)
_OPEN_FILES = 256
_OPEN_INDEXES = 64
_OPEN_LISTINGS = 4
_SEGMENT_BYTES = 1 << 23
"""Unit of reading ahead."""
_ADVICE_BYTES = 1 << 17
"""Linux reads at most a device's read-ahead for one piece of advice."""
_REMEMBERED_SEGMENTS = 1 << 11


class PackedImages:
    """The images of a packed directory, encoded, by id or by row. Thread-safe.

    The window moves over contiguous rows, so the second access to a segment of 8 MiB reads the whole segment ahead,
    sequentially; the system's cache keeps it while the window is there. Indexes are mapped on first use. However many
    tars and ranges there are, at most a fifth of the files that the process may open are open, and one more for each
    reading thread. Images that are still being added are not included.

    Raises:
        ValueError: no packed images, an incomplete first range, or an index that does not match the manifest.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        manifest = Manifest.load(directory)
        self.manifest = manifest.finished
        if not self.manifest.ranges:
            raise ValueError(f"{directory} is not completely packed: repeat the command that packs it")
        if not manifest.complete:
            added = manifest.num_images - len(self)
            _log.warning(
                "%(path)s without %(images)d images that are being added: repeat the command that adds them",
                {"path": str(directory), "images": added},
            )
        self.order = RangesOrder(self.manifest.sizes, self.manifest.order_seed)
        self._firsts = np.array([shard.first for shard in self.manifest.shards])
        self._ends = np.append(self._firsts[1:], len(self))
        for part in self.manifest.ranges:
            check_index(index_path(directory, part.first), part.count)
        self._index = functools.lru_cache(_share_of_files(16, _OPEN_INDEXES))(map_index)
        self._open = functools.lru_cache(_share_of_files(8, _OPEN_FILES))(_Descriptor)
        self._read_ahead = _ReadAhead()
        self._range_firsts = np.array([part.first for part in self.manifest.ranges])
        self._listing = functools.lru_cache(_OPEN_LISTINGS)(self._open_listing)

    def __len__(self) -> int:
        return self.manifest.num_images

    def read(self, image: int) -> bytes:
        """The encoded bytes that stand for image 0..N-1. Raises OSError if they cannot be read."""
        return self.read_row(self._row(image))

    def read_row(self, row: int) -> bytes:
        """The encoded bytes of row 0..N-1. Raises OSError if they cannot be read."""
        shard = self._shard(row)
        (record,) = self._records(row, row + 1)
        path = tar_path(self.directory, int(self._firsts[shard]))
        file = self._open(path)
        offset, length = int(record["offset"]), int(record["length"])
        self._read_ahead.note_access(file, shard, offset)
        return _pread(file, length, offset, path)

    def positions(self, images: Int64Array) -> Int64Array:
        """The rows of images, both int64 [n]; rows are stored in their order."""
        return self.order.rows(images)

    def path(self, image: int) -> str:
        """Path of an image's file when it was packed; in a tar, followed by a colon and the member's name."""
        number = self._range(image)
        return self._listing(number).path(image - self.manifest.ranges[number].first)

    def _open_listing(self, number: int) -> Listing:
        part = self.manifest.ranges[number]
        return Listing.open(listing_path(self.directory, part.first), Path(part.root))

    def shown(self) -> Int64Array:
        """The id of the image that stands for each image, int64 [N]: another one if the image is broken."""
        return self._by_image("shown", limit=len(self))

    @functools.cached_property
    def replaced(self) -> Int64Array:
        """The ids of broken images, for which others stand."""
        return np.flatnonzero(self.shown() != np.arange(len(self)))

    def lengths(self) -> Int64Array:
        """The number of bytes that stand for each image, int64 [N]."""
        return self._by_image("length", limit=np.iinfo(np.int64).max)

    def written_at(self) -> Int64Array:
        """When the tar of each image was written, int64 [N], in nanoseconds since 1970."""
        times = np.array([tar_path(self.directory, first).stat().st_mtime_ns for first in self._firsts.tolist()])
        shards = np.searchsorted(self._firsts, self.order.rows(np.arange(len(self))), side="right") - 1
        return times[shards]

    def labels(self) -> Int64Array:
        """The class of each image, int64 [N]; −1 without labels."""
        return self._by_image("label", limit=len(self.manifest.classes) or np.iinfo(np.int64).max)

    def _by_image(self, field: str, *, limit: int) -> Int64Array:
        """A field of the index, int64 [N], by image; its values must be less than `limit`."""
        values, found = np.empty(len(self), np.int64), np.zeros(len(self), bool)
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

    def _records(self, start: int, stop: int) -> NDArray[np.void]:
        """The records of rows start … stop−1, all of one tar."""
        part = self.manifest.ranges[self._range(start)]
        index = self._index(index_path(self.directory, part.first), part.count)
        return index[start - part.first : stop - part.first]

    def _range(self, number: int) -> int:
        """The number of the range that contains a row or an image."""
        return int(np.searchsorted(self._range_firsts, number, side="right")) - 1

    def _damaged(self, row: int) -> ValueError:
        return ValueError(
            f"the index of {self.directory} is damaged, in the records from row {row} on: "
            "'pic verify' names the damaged files; pack the images again, into a new directory"
        )

    def _row(self, image: int) -> int:
        return int(self.order.rows(np.array([image]))[0])

    def _shard(self, row: int) -> int:
        """The number of the tar that contains a row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not in 0..{len(self) - 1}")
        return int(np.searchsorted(self._firsts, row, side="right")) - 1


class _ReadAhead:
    """Reads a segment of a tar ahead on the second access to it; rows in random order rarely access one twice."""

    def __init__(self) -> None:
        self._segments: OrderedDict[tuple[int, int], bool] = OrderedDict()  # whether it was read ahead
        self._lock = threading.Lock()

    def note_access(self, file: _Descriptor, shard: int, offset: int) -> None:
        segment = offset // _SEGMENT_BYTES
        with self._lock:
            was_read_ahead = self._segments.get((shard, segment))
            self._segments[shard, segment] = was_read_ahead is not None
            if len(self._segments) > _REMEMBERED_SEGMENTS:
                self._segments.popitem(last=False)
        if was_read_ahead is False and hasattr(os, "posix_fadvise"):
            for start in range(segment * _SEGMENT_BYTES, (segment + 1) * _SEGMENT_BYTES, _ADVICE_BYTES):
                os.posix_fadvise(file.number, start, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)


def _pread(file: _Descriptor, length: int, offset: int, path: Path) -> bytes:
    content = os.pread(file.number, length, offset)
    if len(content) != length:
        raise OSError(f"{path} is cut off: pack the images again, into a new directory")
    return content


def _share_of_files(divisor: int, most: int) -> int:
    """Number of files of one kind to keep open: the process's limit over `divisor`, at least 1 and at most `most`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // divisor))


class _Descriptor:
    """A file that stays open for reading as long as this object exists."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
