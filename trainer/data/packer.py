"""Writes the tars of a pack: each image is decoded once, and a broken one is replaced by the next intact one."""

from __future__ import annotations

import hashlib
import io
import logging
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.bucket_sources import place_of
from trainer.data.decode import BrokenImageError, suffix_of, why
from trainer.data.decoded_images import BrokenImages, broken_line
from trainer.data.finished_tars import FinishedTars
from trainer.data.index import INDEX
from trainer.data.listing import NO_LABEL, Listing
from trainer.data.manifest import Manifest, Shard, tar_path
from trainer.data.pack_plan import PackOptions
from trainer.data.parts import WHOLE
from trainer.display import Counting
from weightserver.common.atomic_files import atomic_write, sha256
from weightserver.common.logs import Remark, say
from weightserver.common.object_store import is_remote
from weightserver.common.threads import in_other_thread
from weightserver.torch import RangesOrder

_REQUESTS = 32
"""Images that are asked for at a time where a bucket has them, however few cores decode them."""


@dataclass(frozen=True)
class _Sample:
    """The content of one row."""

    image: int
    shown: int
    label: int
    suffix: str
    content: bytes
    broken: str
    """The reason why the image itself is not shown; empty if it is."""


class Packer:
    """Packs those tars of a manifest's last range, or of the part of `options`, that are not finished.

    Args:
        listing: of the range's images.
        place: where their source is read: in a bucket or on this machine.
        tars: where they go, each while the next one is packed.
        folder: in which they are packed.

    Raises:
        ValueError: a listing that does not fit the manifest.
    """

    def __init__(
        self,
        manifest: Manifest,
        listing: Path,
        place: Path,
        options: PackOptions,
        tars: FinishedTars,
        folder: Path,
        progress: Counting,
    ) -> None:
        self._options, self._tars, self._folder, self._progress = options, tars, folder, progress
        self._range = manifest.ranges[-1]
        root = Path(self._range.root)
        place = root if is_remote(place) else place_of(root, options.source)
        self._listing = Listing.open(listing, root, place)
        self._threads = max(options.threads, _REQUESTS) if is_remote(place) else options.threads
        if len(self._listing) != self._range.count:
            raise ValueError(f"{listing} does not have as many images as the manifest says")
        self._rows = self._range.tars(options.part or WHOLE)
        self._order = RangesOrder(manifest.sizes, manifest.order_seed)
        self._rendering = options.source.rendering()

    def run(self) -> None:
        """Packs tar after tar.

        Raises:
            ValueError: too many broken images.
            OSError: a disk cannot be written.
        """
        decoding, keeping = ThreadPoolExecutor(self._threads), ThreadPoolExecutor(1)
        try:
            in_other_thread(lambda: self._pack(decoding, keeping))
        finally:  # which also ends the thread that an interrupt leaves behind
            decoding.shutdown(cancel_futures=True)
            keeping.shutdown()

    def _pack(self, decoding: ThreadPoolExecutor, keeping: ThreadPoolExecutor) -> None:
        broken = list[int]()
        for _, content in self._tars.finished():
            records = np.frombuffer(content, INDEX)
            broken += (records["image"][records["image"] != records["shown"]] - self._range.first).tolist()
        self._broken = BrokenImages(self._options.source, self._range.count, broken)
        samples = self._samples(self._tars.missing, decoding)
        kept: Future[None] | None = None
        for first in self._tars.missing:
            shard, content = self._written(first, samples)
            if kept:
                kept.result()
            kept = keeping.submit(self._tars.add, tar_path(self._folder, first), shard, content)
        if kept:
            kept.result()
        self._show(self._rows.stop)

    def _show(self, row: int) -> None:
        self._progress.update(row - self._rows.start, self._rows.stop - self._rows.start)

    def _rows_from(self, first: int) -> range:
        """The rows of the tar that begins with one."""
        return range(first, min(first + self._rows.step, self._rows.stop))

    def _written(self, first: int, samples: Iterator[_Sample]) -> tuple[Shard, bytes]:
        """Writes the tar that begins with a row; returns its line in the list of tars, and its records."""
        index: list[tuple[int, int, int, int, int]] = []
        num_broken = 0

        def write(path: Path) -> None:
            nonlocal num_broken
            with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
                for row, sample in zip(self._rows_from(first), samples, strict=False):  # the rest is of later tars
                    self._show(row)
                    offset = tar.offset + tarfile.BLOCKSIZE  # after the header
                    _add(tar, f"{row:012d}.{sample.suffix}", sample.content)
                    if sample.label != NO_LABEL:
                        _add(tar, f"{row:012d}.cls", str(sample.label).encode())
                    index.append((offset, len(sample.content), sample.image, sample.shown, sample.label))
                    if sample.broken:
                        self._name_broken(sample)
                        num_broken += 1

        tar = tar_path(self._folder, first)
        atomic_write(tar, write)
        records = np.array(index, INDEX).tobytes()
        shard = Shard(
            first=first,
            count=len(index),
            bytes=tar.stat().st_size,
            sha256=sha256(tar),
            index_sha256=hashlib.sha256(records).hexdigest(),
            num_broken=num_broken,
        )
        return shard, records

    def _name_broken(self, sample: _Sample) -> None:
        path = self._listing.path(sample.image - self._range.first)
        shown = self._listing.path(sample.shown - self._range.first)
        sentence = f"broken: {path} ({sample.broken}), replaced by {shown}"
        say(Remark(sentence, path=path, why=sample.broken, replaced_by=shown), logging.WARNING)

    def _samples(self, tars: list[int], pool: ThreadPoolExecutor) -> Iterator[_Sample]:
        """The samples of the tars that begin with these rows, some of them computed ahead."""
        ahead: deque[Future[_Sample]] = deque()
        for first in tars:
            for image in self._order.images(np.array(self._rows_from(first))).tolist():
                ahead.append(pool.submit(self._sample, image))
                if len(ahead) > 4 * self._threads:
                    yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _sample(self, image: int) -> _Sample:
        own = shown = image - self._range.first
        broken = ""
        while True:
            try:
                content = self._listing.read(shown)
                suffix = suffix_of(content, self._rendering)
            except (BrokenImageError, OSError) as error:
                broken = broken or why(error)
                self._broken.note(shown, broken_line(self._listing.path(shown), error))
                shown = self._broken.first_from(shown)
                continue
            label = self._listing[own].label
            return _Sample(image, self._range.first + shown, label, suffix, content, broken)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
