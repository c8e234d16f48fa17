"""Packs images in the order in which they are visited, so that a window of rows is a contiguous range of files.

Row r of a range holds the image that `RangesOrder` assigns to it, in tars of a bounded size that webdataset can read;
`manifest.py` describes the format. Every image is decoded once. A broken image is reported and replaced by the next
intact one by id (after the last of its range, the first), under its own label. All tars of a range have the same number
of rows, but for the last. The packed files are a function of the listing, the order's seed and this number: a pack that
was killed and continued has the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import logging
import tarfile
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from trainer.data.bucket_sources import local_source, place_of
from trainer.data.decode import BrokenImageError, suffix_of, why
from trainer.data.decoded_images import BrokenImages, broken_line
from trainer.data.index import INDEX, read_records
from trainer.data.listing import NO_LABEL, Listing
from trainer.data.manifest import (
    Manifest,
    Range,
    Shard,
    index_path,
    is_packed,
    listing_path,
    tar_path,
)
from trainer.data.pack_parts import LOCK, PLANNING, TarsOnDisk, parts_begun
from trainer.data.pack_plan import PackOptions as PackOptions
from trainer.data.pack_plan import begun, planned
from trainer.data.packed import PackedImages
from trainer.data.parts import WHOLE
from trainer.data.reading import Reading, read_source
from trainer.display import Counting, counting, stage
from weightserver.common.atomic_files import atomic_write, locked, sha256
from weightserver.common.logs import Remark, say
from weightserver.common.object_store import absolute, is_remote, shown
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


def pack(source: Path, output: Path, options: PackOptions) -> Manifest:
    """Packs the images of `source` into the directory `output`, or continues an earlier call that was interrupted.

    Test images of a source with splits are packed into `output`/test. The images are listed once: images that are added
    to `source` later are included by `extend`, which gives new ids to images whose paths are new. Packing a complete
    pack does nothing. Returns the manifest of the training images.

    Raises:
        ValueError: a source without images, a directory that holds another pack, too many broken images.
        OSError: the directory cannot be written, or another process packs into it.
    """
    with planned_pack(source, output, options) as plan, counting("packing") as progress, stage("packing"):
        packed = [_pack_split(*split, plan.place, options, progress) for split in plan.manifests.items()]
        return packed[0]


class Plan(NamedTuple):
    """A pack that is planned."""

    manifests: dict[Path, Manifest]
    """By directory: its own, and that of its test images, if any."""
    place: Path
    """Where its source is read: in a bucket or on this machine."""


@contextmanager
def planned_pack(source: Path, output: Path, options: PackOptions) -> Iterator[Plan]:
    """Plans a pack unless it is planned.

    While it is open, no other process packs into them, except other parts if `options` have one. The first of these
    lists the images while the others wait; they do not read the source again.

    Raises:
        ValueError, OSError: as `pack`.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is not a directory: give another")
    source = absolute(source)
    if is_packed(source):
        raise ValueError(f"{shown(source)} holds packed images: give the folder or list of images that they came from")
    if output.resolve() == source:
        raise ValueError(f"{output} is the source itself: give another directory")
    reading = None if options.part else read_source(source, options.source)
    output.mkdir(parents=True, exist_ok=True)
    with locked(output / LOCK, shared=bool(options.part), wait=bool(options.part)):
        if reading:
            yield _plan(reading, output, options)
            return
        with locked(output / PLANNING):
            manifests = begun(source, output, options)
            plan = None if manifests else _plan(read_source(source, options.source), output, options)
        yield plan or Plan(manifests, local_source(source, options.source))


def _plan(reading: Reading, output: Path, options: PackOptions) -> Plan:
    """Plans the splits of a source; the manifest in `output` is saved last, because it says that all are planned."""
    if options.extend or not is_packed(output):
        for line in filter(None, (reading.left_out.line(reading.source), *map(Remark, reading.notes))):
            say(line, logging.WARNING)
    plans = dict[Path, Manifest]()
    for split, directory in zip(reading.splits, (output, output / "test"), strict=False):  # others are not used
        directory.mkdir(exist_ok=True)
        extended = replace(options, extend=options.extend and (directory == output or is_packed(directory)))
        plans[directory] = planned(split, directory, extended, plans[output].classes if plans else ())
    for directory, manifest in reversed(plans.items()):
        if not (is_packed(directory) and Manifest.load(directory) == manifest):
            manifest.save(directory)
    return Plan(plans, reading.train.listing.place)


def _pack_split(directory: Path, manifest: Manifest, place: Path, options: PackOptions, progress: Counting) -> Manifest:
    """Packs the last range of a directory, or a part of it, as far as it is not packed; `place` is the plan's."""
    range_, part = manifest.ranges[-1], options.part
    if not manifest.complete:
        others = parts_begun(directory, manifest)
        if part and others and (of := max(others).of) != part.of:
            raise ValueError(f"{directory} is being packed in {of} parts: give --part I/{of}")
        if part and range_.rows_packed:
            raise ValueError(f"{directory} is being packed by one process: repeat its command, without --part")
        if others and not part:
            raise ValueError(f"{directory} is being packed in parts: pack them, then 'pic pack merge {directory}'")
        tars = TarsOnDisk(directory, manifest, part)
        with locked(tars.list):
            Packer(manifest, listing_path(directory, range_.first), place, options, tars, progress).run()
        if part:
            return manifest
    return PackedImages(directory).manifest  # which finds indexes that are missing or cut off


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
    index = index_path(directory, part.first)
    digests = {listing_path(directory, part.first): part.listing_sha256}
    digests |= {tar_path(directory, shard.first): shard.sha256 for shard in part.shards}
    for path in (*digests, index) if part.shards else digests:
        if not path.is_file():
            yield f"{path} is missing"
        elif path != index and sha256(path) != digests[path]:
            yield f"{path} is damaged"
    if index.is_file():
        yield from damage_of_index(index, part)


def damage_of_index(index: Path, part: Range) -> Iterator[str]:
    """A line for each tar whose records in the index of its range differ from the manifest's checksum."""
    for shard in part.shards:
        start = shard.first - part.first
        if hashlib.sha256(read_records(index, start, start + shard.count)).hexdigest() != shard.index_sha256:
            yield f"{index} is damaged in rows {shard.first}..{shard.first + shard.count - 1}"


class Tars(Protocol):
    """Where the tars of a range, or of a part of it, go."""

    folder: Path
    """In which each is written."""

    def finished(self) -> Iterator[tuple[Shard, bytes]]:
        """Those that are there, in order, with their records."""

    def add(self, shard: Shard, records: bytes) -> None:
        """Keeps a tar that is in `folder`, with its records: from then on it is finished."""


class Packer:
    """Packs those tars of a manifest's last range, or of the part of `options`, that are not finished.

    Args:
        listing: of the range's images.
        place: where their source is read: in a bucket or on this machine.
        tars: where they go.

    Raises:
        ValueError: a listing that does not fit the manifest.
    """

    def __init__(
        self, manifest: Manifest, listing: Path, place: Path, options: PackOptions, tars: Tars, progress: Counting
    ) -> None:
        self._options, self._tars, self._progress = options, tars, progress
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
        finished, broken = set[int](), list[int]()
        for shard, content in self._tars.finished():
            finished.add(shard.first)
            records = np.frombuffer(content, INDEX)
            broken += (records["image"][records["image"] != records["shown"]] - self._range.first).tolist()
        missing = [row for row in self._rows if row not in finished]
        self._broken = BrokenImages(self._options.source, self._range.count, broken)
        with closing(self._samples(missing)) as samples:
            for row in missing:
                self._write_tar(row, samples)
        self._show(self._rows.stop)

    def _show(self, row: int) -> None:
        self._progress.update(row - self._rows.start, self._rows.stop - self._rows.start)

    def _rows_from(self, first: int) -> range:
        """The rows of the tar that begins with one."""
        return range(first, min(first + self._rows.step, self._rows.stop))

    def _write_tar(self, first: int, samples: Iterator[_Sample]) -> None:
        """Writes the tar that begins with a row."""
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

        tar = tar_path(self._tars.folder, first)
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
        self._tars.add(shard, records)

    def _name_broken(self, sample: _Sample) -> None:
        path = self._listing.path(sample.image - self._range.first)
        shown = self._listing.path(sample.shown - self._range.first)
        sentence = f"broken: {path} ({sample.broken}), replaced by {shown}"
        say(Remark(sentence, path=path, why=sample.broken, replaced_by=shown), logging.WARNING)

    def _samples(self, tars: list[int]) -> Generator[_Sample, None, None]:
        """The samples of the tars that begin with these rows, some of them computed ahead."""
        ahead: deque[Future[_Sample]] = deque()
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                for first in tars:
                    for image in self._order.images(np.array(self._rows_from(first))).tolist():
                        ahead.append(pool.submit(self._sample, image))
                        if len(ahead) > 4 * self._threads:
                            yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

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
