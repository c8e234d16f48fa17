"""Reads packed images: any row or image by its number, and a window of rows as contiguous bytes."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.config import SourceOptions
from trainer.data.index import INDEX, check_index
from trainer.data.listing import Listing
from trainer.data.manifest import Manifest, index_path, listing_path, tar_path
from trainer.data.pack_files import File, pack_files
from weightserver.common.object_store import is_remote, shown
from weightserver.core.arrays import Int64Array
from weightserver.torch import RangesOrder

_log = logging.getLogger(__name__)
_OPEN_LISTINGS = 4


class PackedImages:
    """The images of a packed directory, encoded, by id or by row. Thread-safe.

    Images that are still being added are not included.

    Args:
        directory: of the pack, on a disk or in a bucket.
        options: where what is read of a bucket is kept.

    Raises:
        ValueError: no packed images, an incomplete first range, or an index that does not match the manifest.
    """

    def __init__(self, directory: Path, options: SourceOptions | None = None) -> None:
        self.directory = directory
        manifest = Manifest.load(directory)
        self.manifest = manifest.finished
        if not self.manifest.ranges:
            raise ValueError(
                f"{shown(directory)} is not completely packed: repeat the command that packs it; "
                "'pic pack merge' joins parts"
            )
        if not manifest.complete:
            added = manifest.num_images - len(self)
            _log.warning(
                "%(path)s without %(images)d images that are being added: repeat the command that adds them",
                {"path": shown(directory), "images": added},
            )
        self.order = RangesOrder(self.manifest.sizes, self.manifest.order_seed)
        self._shards = self.manifest.shards
        self._firsts = np.array([shard.first for shard in self._shards])
        for part in self.manifest.ranges if not is_remote(directory) else ():
            check_index(index_path(directory, part.first), part.count)
        self._files = pack_files(directory, options or SourceOptions())
        self._index = functools.cache(self._index_of)
        self._range_firsts = np.array([part.first for part in self.manifest.ranges])
        self._listing = functools.lru_cache(_OPEN_LISTINGS)(self._open_listing)

    def __len__(self) -> int:
        return self.manifest.num_images

    def read(self, image: int) -> bytes:
        """The encoded bytes that stand for image 0..N-1. Raises OSError if they cannot be read."""
        return self.read_row(int(self.order.rows(np.array([image]))[0]))

    def read_row(self, row: int) -> bytes:
        """The encoded bytes of row 0..N-1. Raises OSError if they cannot be read."""
        return self._files.read(self._tar(row), *self._place(row))

    def read_ahead(self, images: Int64Array) -> float:
        """Begins to read images that will be read, int64 [n]; returns how much of what may be read ahead that is,
        0 … 1."""
        rows = self.order.rows(images).tolist()
        return sum(self._files.read_ahead(self._tar(row), *self._place(row)) for row in rows)

    def positions(self, images: Int64Array) -> Int64Array:
        """The rows of images, both int64 [n]; rows are stored in their order."""
        return self.order.rows(images)

    def path(self, image: int) -> str:
        """Path of an image's file when it was packed; in a tar, followed by a colon and the member's name."""
        number = self._range(image)
        return self._listing(number).path(image - self.manifest.ranges[number].first)

    def _open_listing(self, number: int) -> Listing:
        part = self.manifest.ranges[number]
        path = listing_path(self.directory, part.first)
        return Listing.open(self._files.whole(path, part.listing_sha256), Path(part.root))

    def between(self, start: int, stop: int) -> Int64Array:
        """The images of rows start … stop−1, ascending: int64 [n]."""
        if start <= 0 and len(self) <= stop:
            return np.arange(len(self))
        return np.sort(self.order.images(np.arange(max(0, start), min(len(self), stop))))

    def replaced(self, images: Int64Array) -> Int64Array:
        """The broken ones of images (int64 [n]), for which others stand; ascending, int64 [m]. Reads the records of
        their rows only.

        Raises:
            ValueError: an index that does not match the manifest.
        """
        rows = np.sort(self.order.rows(images))
        tars = np.searchsorted(self._firsts, rows, side="right")
        apart = np.flatnonzero((np.diff(rows) != 1) | (np.diff(tars) != 0)) + 1
        found = [np.empty(0, np.int64)]
        for own in np.split(rows, apart) if len(rows) else ():
            records = self._records(int(own[0]), int(own[-1]) + 1)
            if not np.array_equal(records["image"], self.order.images(own)):
                raise self._damaged(int(own[0]))
            found.append(records["image"][records["image"] != records["shown"]])
        return np.sort(np.concatenate(found))

    def lengths(self) -> Int64Array:
        """The number of bytes that stand for each image, int64 [N]."""
        return self._by_image("length", limit=np.iinfo(np.int64).max)

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
        number = self._range(start)
        first, size = self.manifest.ranges[number].first, INDEX.itemsize
        content = self._files.read(self._index(number), (start - first) * size, (stop - start) * size)
        return np.frombuffer(content, INDEX)

    def _index_of(self, number: int) -> File:
        part = self.manifest.ranges[number]
        return File(index_path(self.directory, part.first), part.count * INDEX.itemsize, part.index_digest)

    def _tar(self, row: int) -> File:
        """The tar that contains a row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not in 0..{len(self) - 1}")
        shard = self._shards[int(np.searchsorted(self._firsts, row, side="right")) - 1]
        return File(tar_path(self.directory, shard.first), shard.bytes, shard.sha256)

    def _place(self, row: int) -> tuple[int, int]:
        """Offset and length of a row's image in its tar."""
        (record,) = self._records(row, row + 1)
        return int(record["offset"]), int(record["length"])

    def _range(self, number: int) -> int:
        """The number of the range that contains a row or an image."""
        return int(np.searchsorted(self._range_firsts, number, side="right")) - 1

    def _damaged(self, row: int) -> ValueError:
        return ValueError(
            f"the index of {shown(self.directory)} is damaged, in the records from row {row} on: "
            "'pic verify' names the damaged files; pack the images again, into a new directory"
        )
