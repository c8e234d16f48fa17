"""Packs images in the order in which they are visited, so that a window of rows is a contiguous range of files.

Row r of a range holds the image that `RangesOrder` assigns to it, in tars of a bounded size that webdataset can read;
`manifest.py` describes the format. Every image is decoded once. A broken image is reported and replaced by the next
intact one by id (after the last of its range, the first), under its own label. All tars of a range have the same number
of rows, but for the last. The packed files are a function of the listing, the order's seed and this number: a pack that
was killed and continued has the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import tarfile
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from trainer.data.decode import BrokenImageError, facts, why
from trainer.data.decoded_images import BrokenImages, broken_line
from trainer.data.index import INDEX, add_records, cut_index, read_records
from trainer.data.listing import NO_LABEL, Listing
from trainer.data.manifest import (
    Manifest,
    Range,
    Shard,
    add_shard,
    index_path,
    is_packed,
    listing_path,
    tar_path,
)
from trainer.data.pack_plan import PackOptions as PackOptions
from trainer.data.pack_plan import planned
from trainer.data.packed import PackedImages
from trainer.data.reading import Split, read_source
from trainer.display import Counting, counting, stage
from weightserver.common.atomic_files import atomic_write, sha256
from weightserver.common.logs import Remark, say
from weightserver.torch import RangesOrder

_ROWS_TOGETHER = 1 << 16


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


def pack(source: Path, output: Path, options: PackOptions) -> Manifest:
    """Packs the images of `source` into the directory `output`, or continues an earlier call that was interrupted.

    Test images of a source with splits are packed into `output`/test. The images are listed once: images that are added
    to `source` later are included by `extend`, which gives new ids to images whose paths are new. Packing a complete
    pack does nothing. Returns the manifest of the training images.

    Raises:
        ValueError: a source without images, a directory that holds another pack, too many broken images.
        OSError: the directory cannot be written, or another process packs into it.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is not a directory: give another")
    source = source.resolve()
    if is_packed(source):
        raise ValueError(f"{source} holds packed images: give the folder or list of images that they came from")
    if output.resolve() == source:
        raise ValueError(f"{output} is the source itself: give another directory")
    reading = read_source(source, options.source)
    output.mkdir(parents=True, exist_ok=True)
    with _only_packer(output), counting("packing") as progress, stage("packing"):
        if options.extend or not is_packed(output):
            for line in filter(None, (reading.left_out.line(source), *map(Remark, reading.notes))):
                say(line, logging.WARNING)
        packed = list[Manifest]()
        for split, directory in reading.to_pack(output):
            directory.mkdir(exist_ok=True)
            extended = replace(options, extend=options.extend and (directory == output or is_packed(directory)))
            known = packed[0].classes if packed else ()
            packed.append(_pack_split(split, directory, extended, progress, known))
        return packed[0]


def _pack_split(
    split: Split, output: Path, options: PackOptions, progress: Counting, known: tuple[str, ...]
) -> Manifest:
    manifest = planned(split, output, options, known)
    part = manifest.ranges[-1]
    listing = Listing.open(listing_path(output, part.first), Path(part.root))
    packed = _Packer(output, manifest, listing, options, progress).run()
    PackedImages(output)  # finds indexes that are missing or cut off
    return packed


def verify(directory: Path) -> list[str]:
    """Compares the packed files with the manifest's checksums; returns a line for each that differs, and one for a
    pack that is not finished."""
    manifest = Manifest.load(directory)
    part = manifest.ranges[-1]
    missing = []
    if not manifest.complete:
        missing.append(
            f"{directory} is not finished: {part.rows_packed:,} of {part.count:,} images of {part.source} are packed: "
            "repeat the command that packs them"
        )
    return missing + [line for part in manifest.ranges for line in _damage(directory, part)]


def _damage(directory: Path, part: Range) -> Iterator[str]:
    for shard in part.shards:
        yield from _file_damage(tar_path(directory, shard.first), shard.sha256)
    if not part.shards:
        return
    path = index_path(directory, part.first)
    if not path.is_file():
        yield f"{path} is missing"
        return
    for shard in part.shards:
        start = shard.first - part.first
        if hashlib.sha256(read_records(path, start, start + shard.count)).hexdigest() != shard.index_sha256:
            yield f"{path} is damaged in rows {shard.first}..{shard.first + shard.count - 1}"


def _file_damage(path: Path, expected: str) -> Iterator[str]:
    if not path.is_file():
        yield f"{path} is missing"
    elif sha256(path) != expected:
        yield f"{path} is damaged"


@contextmanager
def _only_packer(output: Path) -> Iterator[None]:
    descriptor = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another process is packing into {output}: wait for it, or end it") from None
        yield
    finally:
        os.close(descriptor)


class _Packer:
    """Packs the missing rows of a manifest's last range."""

    def __init__(
        self, output: Path, manifest: Manifest, listing: Listing, options: PackOptions, progress: Counting
    ) -> None:
        self._output, self._manifest, self._listing, self._progress = output, manifest, listing, progress
        self._threads = options.threads
        self._part = manifest.ranges[-1]
        if len(listing) != self._part.count:
            raise ValueError(
                f"{listing_path(output, self._part.first)} does not have as many images as the manifest says"
            )
        self._rendering = options.source.rendering("none")
        self._options = options.source

    def run(self) -> Manifest:
        """Packs tar after tar, each named in the manifest when its files are in place."""
        first, end = self._part.first, self._part.first + self._part.count
        packed = first + self._part.rows_packed
        if packed < end:
            self._truncate_to_manifest()
            self._broken = BrokenImages(self._options, self._part.count, self._known_broken())
        with closing(self._samples(packed - first)) as samples:
            for row in range(packed, end, self._part.rows_per_tar):
                shard = self._write_shard(row, min(self._part.rows_per_tar, end - row), samples)
                self._part = add_shard(self._output, self._part, shard)
        self._progress.update(self._part.count, self._part.count)
        return replace(self._manifest, ranges=(*self._manifest.ranges[:-1], self._part))

    def _truncate_to_manifest(self) -> None:
        """Truncates files to what the manifest names: a pack that was killed may have written more."""
        self._part = self._manifest.ranges[-1]
        self._manifest.save(self._output)
        cut_index(index_path(self._output, self._part.first), self._part.rows_packed)

    def _known_broken(self) -> Iterator[int]:
        """The images, numbered in the range, that are broken in the rows that are packed already."""
        first = self._part.first
        for shard in self._part.shards:
            start = shard.first - first
            content = read_records(index_path(self._output, first), start, start + shard.count)
            records = np.frombuffer(content, INDEX)
            yield from (records["image"][records["image"] != records["shown"]] - first).tolist()

    def _write_shard(self, first: int, count: int, samples: Iterator[_Sample]) -> Shard:
        """Writes the tar of rows first … first+count−1, and adds its records to the index."""
        index: list[tuple[int, int, int, int, int]] = []
        num_broken = 0

        def write(path: Path) -> None:
            nonlocal num_broken
            with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
                for row, sample in enumerate(islice(samples, count), first):
                    self._progress.update(row - self._part.first, self._part.count)
                    offset = tar.offset + tarfile.BLOCKSIZE  # after the header
                    _add(tar, f"{row:012d}.{sample.suffix}", sample.content)
                    if sample.label != NO_LABEL:
                        _add(tar, f"{row:012d}.cls", str(sample.label).encode())
                    index.append((offset, len(sample.content), sample.image, sample.shown, sample.label))
                    if sample.broken:
                        self._name_broken(sample)
                        num_broken += 1

        tar = tar_path(self._output, first)
        atomic_write(tar, write)
        return Shard(
            first=first,
            count=count,
            bytes=tar.stat().st_size,
            sha256=sha256(tar),
            index_sha256=add_records(index_path(self._output, self._part.first), np.array(index, INDEX)),
            num_broken=num_broken,
        )

    def _name_broken(self, sample: _Sample) -> None:
        path = self._listing.path(sample.image - self._part.first)
        shown = self._listing.path(sample.shown - self._part.first)
        sentence = f"broken: {path} ({sample.broken}), replaced by {shown}"
        say(Remark(sentence, path=path, why=sample.broken, replaced_by=shown), logging.WARNING)

    def _samples(self, start: int) -> Generator[_Sample, None, None]:
        """The samples of the range's rows from `start` on, some of them computed ahead."""
        first, count = self._part.first, self._part.count
        order = RangesOrder(self._manifest.sizes, self._manifest.order_seed)
        ahead: deque[Future[_Sample]] = deque()
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                for chunk in range(start, count, _ROWS_TOGETHER):
                    rows = np.arange(first + chunk, first + min(count, chunk + _ROWS_TOGETHER))
                    for image in order.images(rows).tolist():
                        ahead.append(pool.submit(self._sample, image))
                        if len(ahead) > 4 * self._threads:
                            yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _sample(self, image: int) -> _Sample:
        own = shown = image - self._part.first
        broken = ""
        while True:
            try:
                content = self._listing.read(shown)
                suffix = facts(content, self._rendering).suffix
            except (BrokenImageError, OSError) as error:
                broken = broken or why(error)
                self._broken.note(shown, broken_line(self._listing.path(shown), error))
                shown = self._broken.first_from(shown)
                continue
            label = self._listing[own].label
            return _Sample(image, self._part.first + shown, label, suffix, content, broken)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
