"""Packs that go to a bucket tar by tar, all of them or in parts, so that a machine has a few of the tars only.

    parts/PLAN-FIRST    of a finished tar: its line in the list of tars, and its records; uploaded after the tar

PLAN is a digest of manifest.json. Part 0 lists the images and uploads the listing and, last, manifest.json; the others
wait for that. Which tars there are follows from it alone: a command that is repeated on another machine, or in another
number of parts, continues with what is missing. The pack is finished when it has its list of tars, which merging makes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trainer.data.bucket_packs import claimed, lost_tars, send, unclaim
from trainer.data.bucket_sources import local_source
from trainer.data.cache import writing
from trainer.data.config import SourceOptions
from trainer.data.manifest import (
    Manifest,
    Range,
    Shard,
    index_path,
    is_packed,
    line_of,
    listing_path,
    manifests_in,
    shards_path,
    tar_path,
)
from trainer.data.pack import Packer, Plan, planned_pack
from trainer.data.pack_files import CachedFiles
from trainer.data.pack_plan import AnotherPackError, PackOptions, begun
from trainer.data.parts import WHOLE, Part
from trainer.data.reading import counted
from trainer.display import counting, stage
from weightserver.common.atomic_files import directory_lock, make_directory, sha256
from weightserver.common.logs import Remark, say
from weightserver.common.object_store import (
    ObjectStoreError,
    Reason,
    absolute,
    create,
    digest_of,
    directly_below,
    find,
    read,
    remove,
    shown,
    unless_missing,
    write,
)

_LOOK_SECONDS = 5.0
"""How often a part looks whether the images are listed."""
_READERS = 16
"""Objects that are read at the same time."""
_FILES_OF_A_PACK = (".tar", ".bin", ".jsonl")
_NOTE = re.compile(r"[0-9a-f]{12}-\d{12}")


def pack_in_bucket(source: Path, target: Path, options: PackOptions) -> Manifest:
    """Packs images into a bucket, or the part of `options` of them, as far as its tars are not there. The first part
    lists the images; the others wait until it has.

    Returns the manifest of the training images; that of a part has no tars before `merge_in_bucket`.

    Raises:
        ValueError: as `pack`; a bucket that refuses or does not answer, or holds another pack.
        OSError: the disk cannot be written, or another process packs this part with the same --cache-dir.
    """
    part = options.part or WHOLE
    with _work_folder(target, f"{part.number}-of-{part.of}", options.source) as folder:
        if part.number:
            _wait_for_the_plan(target, f"0/{part.of}")
        plan = plan_in_bucket(source, target, options)
        with counting("packing") as progress, stage("packing"), ThreadPoolExecutor(1) as sender:
            for there, manifest in plan.manifests.items():
                if not manifest.complete:
                    tars = _Sending(_TarsInBucket(there, manifest, part), folder, sender)
                    listing = _listing(there, manifest.ranges[-1], options.source)
                    Packer(manifest, listing, plan.place, options, tars, progress).run()
                    tars.finish()
    if options.part:
        return plan.manifests[target]
    with stage("joining the tars"):
        return merge_in_bucket(target, options.source)


def plan_in_bucket(source: Path, target: Path, options: PackOptions) -> Plan:
    """Lists the images of a source for a pack in a bucket, unless that is done; returns the plan of the pack there.

    Raises:
        ValueError, OSError: as `pack_in_bucket`.
    """
    claim = repr((shown(absolute(source)), options.order_seed or 0, options.source.given)).encode()
    if not options.extend and (manifests := begun(source, target, options)):
        unclaim(target, claim)  # of the same command with --extend, if it was killed
        return Plan(manifests, local_source(source, options.source))
    with _work_folder(target, "plan", options.source) as folder, claimed(target, claim):
        if not options.extend and (manifests := begun(source, target, options)):  # planned meanwhile
            return Plan(manifests, local_source(source, options.source))
        before = manifests_in(target)
        found = () if before else (*directly_below(target), *directly_below(target / "test"))
        if any(one.path.suffix in _FILES_OF_A_PACK for one in found):
            raise ValueError(f"{shown(target)} holds other files: give another place, or remove them")
        for there, manifest in before.items():
            here = folder / there.relative_to(target)
            make_directory(here)
            manifest.save(here)
            for range_ in manifest.ranges:
                shutil.copyfile(_listing(there, range_, options.source), listing_path(here, range_.first))
        with _naming(target, folder), planned_pack(source, folder, replace(options, part=None)) as plan:
            if manifests_in(target) == before:  # or the same command elsewhere was first, with other images perhaps
                _upload_plan(plan, folder, target, before)
        manifests = manifests_in(target)
        if manifests[target] != plan.manifests[folder] and not manifests[target].ranges[-1].is_of(source):
            raise ValueError(f"another command has packed other images to {shown(target)} meanwhile: repeat this one")
        return Plan(manifests, plan.place)


@contextmanager
def _naming(target: Path, folder: Path) -> Iterator[None]:
    """Lets what is wrong with the pack in a folder be told of that in a bucket."""
    try:
        yield
    except AnotherPackError as error:
        place = target / error.directory.relative_to(folder)
        raise AnotherPackError(place, error.wrong, error.remedy) from None


def _upload_plan(plan: Plan, folder: Path, target: Path, before: dict[Path, Manifest]) -> None:
    """Uploads what is new in a plan that was made in a folder."""
    with stage(f"uploading the list of images to {shown(target)}"):
        if not before and folder / "test" not in plan.manifests:  # of a command that was given up
            remove([target / "test" / "manifest.json"])
        for here, manifest in reversed(plan.manifests.items()):
            there, range_ = target / here.relative_to(folder), manifest.ranges[-1]
            if manifest != before.get(there):
                send(listing_path(here, range_.first), listing_path(there, range_.first), range_.listing_sha256)
                put = write if before or there != target else create  # of two plans, the first counts
                put(there / "manifest.json", manifest.content)


def merge_in_bucket(target: Path, options: SourceOptions) -> Manifest:
    """Joins the parts of a pack in a bucket, and of its test images; reads no tar. One that is joined stays as it is.

    Returns the manifest of the training images.

    Raises:
        ValueError: tars that are missing, and nothing is changed, or that are lost since they were joined; a bucket
            that refuses or does not answer.
        OSError: the disk cannot be written, or another process joins them with the same --cache-dir.
    """
    manifests = manifests_in(target) or {target: Manifest.load(target)}  # which says that there is none
    unfinished = [_TarsInBucket(there, each) for there, each in reversed(manifests.items()) if not each.complete]
    for tars in unfinished:
        if tars.missing:
            if Manifest.load(tars.there).complete:
                raise _joined_meanwhile(tars.there)
            raise ValueError(
                f"{len(tars.missing):,} of {counted(tars.range.num_tars, 'tar')} of {shown(tars.there)} missing, first "
                f"that of row {tars.missing[0]:,} of {tars.range.count:,}: repeat 'pic pack SOURCE {shown(target)}', "
                "with --part I/N for the parts that did not end"
            )
    with _work_folder(target, "merge", options) as folder:
        with writing(options.in_cache()):
            joined = [tars.joined(folder / tars.there.relative_to(target)) for tars in unfinished]
        for tars, range_ in zip(unfinished, joined, strict=True):
            digests = range_.digests(tars.there)
            for path in (index_path(tars.there, range_.first), shards_path(tars.there, range_.first)):
                send(folder / path.relative_to(target), path, digests[path])
    finished = manifests_in(target)
    for there, manifest in finished.items():
        if manifest.complete:  # else another command packs more images by now, and has notes of these there
            remove([one.path for one in directly_below(there / "parts") if _NOTE.fullmatch(one.path.name)])
        if lost := lost_tars(there, manifest):
            raise ValueError(
                f"{counted(len(lost), 'tar')} of {shown(there)} missing or cut off, first {lost[0].name}: pack the "
                "images on a disk, and upload that"
            )
    return finished[target].finished


def _joined_meanwhile(there: Path) -> ValueError:
    return ValueError(f"another command has joined the tars of {shown(there)} meanwhile: repeat this one")


class _TarsInBucket:
    """The tars of the last range of a pack in a bucket, or of a part of it, each known by its first row.

    Attributes:
        missing: those that are not finished: they lack line and records, or are not there.
    """

    def __init__(self, there: Path, manifest: Manifest, part: Part = WHOLE) -> None:
        self.there, self.range, self._plan = there, manifest.ranges[-1], manifest.plan
        found = {one.path for folder in (there, there / "parts") for one in directly_below(folder)}
        tars = self.range.tars(part)
        self._finished = [first for first in tars if {tar_path(there, first), self.note(first)} <= found]
        self.missing = sorted(set(tars).difference(self._finished))

    def note(self, first: int) -> Path:
        """Where line and records of a tar are."""
        return self.there / "parts" / f"{self._plan}-{first:012d}"

    def finished(self) -> Iterator[tuple[Shard, bytes]]:
        """The finished tars, in order, and their records."""
        with ThreadPoolExecutor(_READERS) as pool:
            for start in range(0, len(self._finished), _READERS):
                yield from pool.map(self._noted, self._finished[start : start + _READERS])

    def _noted(self, first: int) -> tuple[Shard, bytes]:
        noted = unless_missing(lambda: read(self.note(first)))
        if noted is None:
            raise _joined_meanwhile(self.there)
        line, _, records = noted.partition(b"\n")
        try:
            shard = Shard(**json.loads(line))
        except (ValueError, TypeError):
            raise ObjectStoreError(self.note(first), Reason.DAMAGED) from None
        if hashlib.sha256(records).hexdigest() != shard.index_sha256:
            raise ObjectStoreError(self.note(first), Reason.DAMAGED)
        if digest_of(tar := tar_path(self.there, first)) != shard.sha256:
            raise ObjectStoreError(tar, Reason.DAMAGED)
        return shard, records

    def finished_meanwhile(self, shard: Shard) -> bool:
        """Whether another command has finished a tar that this one has packed, too, as of a part that was given up.

        Raises:
            ValueError: its content is another one.
        """
        tar = tar_path(self.there, shard.first)
        digest = digest_of(tar)
        if not digest or not (find(self.note(shard.first)) or find(shards_path(self.there, self.range.first))):
            return False
        if digest != shard.sha256:
            raise ValueError(
                f"{shown(tar)} was packed by another command meanwhile, with other content, and stays: see whether the "
                "images have changed since they were listed"
            )
        return True

    def joined(self, here: Path) -> Range:
        """Writes index and list into the folder `here`; returns the range with its tars."""
        make_directory(here)
        shards = list[Shard]()
        with index_path(here, self.range.first).open("wb") as index:
            for shard, records in self.finished():
                index.write(records)
                shards.append(shard)
        joined = replace(self.range, shards=tuple(shards))
        shards_path(here, self.range.first).write_bytes(joined.list_of_tars)
        return joined


class _Sending:
    """Tars that are sent when they are packed, each while the next one is packed.

    Args:
        folder: in which they are packed.
        sender: with one thread.
    """

    def __init__(self, tars: _TarsInBucket, folder: Path, sender: ThreadPoolExecutor) -> None:
        self.folder, self.finished = folder, tars.finished
        self._tars, self._sender = tars, sender
        self._sending: Future[None] | None = None

    def add(self, shard: Shard, records: bytes) -> None:
        self.finish()
        self._sending = self._sender.submit(self._add, shard, records)

    def finish(self) -> None:
        """Waits until all tars are finished."""
        if self._sending:
            self._sending.result()

    def _add(self, shard: Shard, records: bytes) -> None:
        tar = tar_path(self.folder, shard.first)
        if not self._tars.finished_meanwhile(shard):
            send(tar, self._tars.there / tar.name, shard.sha256)
            write(self._tars.note(shard.first), line_of(shard) + records)
        tar.unlink()


@contextmanager
def _work_folder(target: Path, name: str, options: SourceOptions) -> Iterator[Path]:
    """An empty folder in --cache-dir, which no other process has meanwhile.

    Raises:
        ValueError: no --cache-dir.
        OSError: another process has it.
    """
    folder = options.in_cache("parts", *target.parts[1:], name)
    with directory_lock(folder):
        shutil.rmtree(folder / "files", ignore_errors=True)  # of a process that was killed
        (folder / "files").mkdir()
        try:
            yield folder / "files"
        finally:
            shutil.rmtree(folder / "files", ignore_errors=True)


def _wait_for_the_plan(target: Path, first: str) -> None:
    if not is_packed(target):
        say(Remark(f"waiting for part {first}, which lists the images", path=shown(target)))
    with stage(f"waiting for part {first}, which lists the images"):
        while not is_packed(target):
            time.sleep(_LOOK_SECONDS)


def _listing(there: Path, range_: Range, options: SourceOptions) -> Path:
    """The listing of a range, in --cache-dir, which the parts on a machine share."""
    path = listing_path(there, range_.first)
    listing = CachedFiles(options).whole(path, range_.listing_sha256)
    if sha256(listing) != range_.listing_sha256:
        raise ObjectStoreError(path, Reason.DAMAGED)
    return listing
