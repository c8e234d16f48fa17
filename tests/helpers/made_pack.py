"""Generated packs of any size: sparse tars with real indexes and manifests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer.data.index import INDEX
from trainer.data.manifest import Manifest, Range, Shard, index_path, tar_path
from weightserver.torch.windows import RowOrder

LENGTH = 1_000
"""Bytes of an image."""
_STRIDE = 1 << 17
"""From one image to the next in a tar, with its header and label."""


def make_pack(directory: Path, *, num_images: int, num_tars: int, num_classes: int = 1_000) -> Path:
    """Fills `directory` with as many images in as many tars, equally many in each; image i is of class i mod n.

    The tars are holes, but for the first eight bytes of their first and last image: the row's number. One image in a
    hundred is broken, the most that packing allows; the next image by id takes its place.
    """
    each, rest = divmod(num_images, num_tars)
    assert not rest
    assert num_images % 100 == 0
    directory.mkdir(parents=True)
    offsets = 1_024 + np.arange(each) * _STRIDE
    shards, order = list[Shard](), RowOrder(num_images, 0)

    def records() -> Iterator[bytes]:
        for first in range(0, num_images, each):
            index = np.zeros(each, INDEX)
            index["offset"], index["length"] = offsets, LENGTH
            index["image"] = images = order.images(np.arange(first, first + each))
            index["shown"] = images + (images % 100 == 0)
            index["label"] = index["shown"] % num_classes
            content = index.tobytes()
            size = 1_024 + each * _STRIDE
            descriptor = os.open(tar_path(directory, first), os.O_WRONLY | os.O_CREAT)
            os.truncate(descriptor, size)
            for row in (0, each - 1):
                os.pwrite(descriptor, (first + row).to_bytes(8), int(offsets[row]))
            os.close(descriptor)
            shards.append(
                Shard(
                    first=first,
                    count=each,
                    bytes=size,
                    sha256=hashlib.sha256(first.to_bytes(8)).hexdigest(),
                    index_sha256=hashlib.sha256(content).hexdigest(),
                    num_broken=int((images % 100 == 0).sum()),
                )
            )
            yield content

    with index_path(directory, 0).open("wb") as file:
        file.writelines(records())
    part = Range(
        first=0,
        count=num_images,
        source="/made",
        root="/made",
        listing_sha256="",
        rows_per_tar=each,
        shards=tuple(shards),
    )
    classes = tuple(f"class {number:06d}" for number in range(num_classes))
    Manifest(order_seed=0, labelled=True, classes=classes, ranges=(part,)).save(directory)
    return directory
