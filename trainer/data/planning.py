"""Plans packs on a disk or in a bucket: one command lists the images, which later ones and other parts pack."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainer.data.bucket_packs import claimed, send, unclaim
from trainer.data.bucket_sources import local_source
from trainer.data.finished_tars import backend_of, check_unused, notes_in
from trainer.data.manifest import LOCK, Manifest, is_packed, listing_path, manifests_in, shards_path
from trainer.data.pack_plan import PackOptions, begun, planned
from trainer.data.reading import Reading, read_source
from trainer.display import stage
from weightserver.common.atomic_files import locked, make_directory
from weightserver.common.logs import Remark, say
from weightserver.common.object_store import absolute, create, is_remote, remove, shown, write

PLANNING = ".planning"
"""File that whoever plans a pack on a disk locks; other parts wait for it, but not until it has packed them."""
_LOOK_SECONDS = 5.0
"""How often a part looks whether the images are listed in a bucket."""


class Plan(NamedTuple):
    """A pack that is planned."""

    manifests: dict[Path, Manifest]
    """By directory: its own, and that of its test images, if any."""
    place: Path
    """Where its source is read: in a bucket or on this machine."""


@contextmanager
def planned_pack(source: Path, target: Path, options: PackOptions) -> Iterator[Plan]:
    """Plans a pack unless it is planned.

    While it is open, no other process packs into a directory, except other parts if `options` have one. The first of
    these lists the images while the others wait; they do not read the source again.

    Raises:
        ValueError, OSError: as `pack`.
    """
    source = absolute(source)
    if is_packed(source):
        raise ValueError(f"{shown(source)} holds packed images: give the folder or list of images that they came from")
    if is_remote(target):
        yield plan_in_bucket(source, target, options)
        return
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is not a directory: give another")
    if target.resolve() == source:
        raise ValueError(f"{target} is the source itself: give another directory")
    reading = None if options.part or is_packed(target) else read_source(source, options.source)
    make_directory(target)
    with locked(target / LOCK, shared=bool(options.part), wait=bool(options.part)):
        with locked(target / PLANNING) if options.part else nullcontext():
            plan = _begun(source, target, options) or _planned_on_disk(
                reading or read_source(source, options.source), target, options
            )
        yield plan


def _begun(source: Path, target: Path, options: PackOptions) -> Plan | None:
    manifests = begun(source, target, options)
    return Plan(manifests, local_source(source, options.source)) if manifests else None


def _planned_on_disk(reading: Reading, target: Path, options: PackOptions) -> Plan:
    before = manifests_in(target)
    if not before:
        check_unused(target)
        (target / "test/manifest.json").unlink(missing_ok=True)  # of a command that was given up
    plans = _planned(reading, target, target, before, options)
    for there, manifest in reversed(plans.items()):  # that of `target` last, because it says that all are planned
        if manifest != before.get(there):
            for note in notes_in(there):  # of a plan before
                note.unlink()
            shards_path(there, manifest.ranges[-1].first).unlink(missing_ok=True)  # of an earlier version
            manifest.save(there)
    return Plan(plans, reading.train.listing.place)


def _planned(
    reading: Reading, target: Path, folder: Path, before: dict[Path, Manifest], options: PackOptions
) -> dict[Path, Manifest]:
    """The manifests by which the splits of a source are packed; new listings are written below a folder."""
    for line in filter(None, (reading.left_out.line(reading.source), *map(Remark, reading.notes))):
        say(line, logging.WARNING)
    plans = dict[Path, Manifest]()
    for split, there in zip(reading.splits, (target, target / "test"), strict=False):  # others are not used
        here = folder / there.relative_to(target)
        here.mkdir(exist_ok=True)
        extended = replace(options, extend=options.extend and (there == target or there in before))
        known = plans[target].classes if plans else ()
        plans[there] = planned(split, before.get(there), there, here, extended, known)
    return plans


def plan_in_bucket(source: Path, target: Path, options: PackOptions) -> Plan:
    """Lists the images of a source for a pack in a bucket, unless that is done. Parts but the first wait for it.

    Raises:
        ValueError, OSError: as `pack`.
    """
    if options.part and options.part.number:
        options.source.in_cache()  # which may be missing: refused before the wait
        _wait_for_the_plan(target, f"0/{options.part.of}")
    claim = repr((shown(source), options.order_seed or 0, options.source.given)).encode()
    if not options.extend and (plan := _begun(source, target, options)):
        unclaim(target, claim)  # of the same command with --extend, if it was killed
        return plan
    with backend_of(target).work_folder(target, "plan", options.source) as folder, claimed(target, claim):
        if plan := _begun(source, target, options):  # planned meanwhile, or begun to be extended
            return plan
        before = manifests_in(target)
        if not before:
            check_unused(target)
        reading = read_source(source, options.source)
        plans = _planned(reading, target, folder, before, options)
        if manifests_in(target) == before:  # or the same command elsewhere was first, with other images perhaps
            _upload(plans, folder, target, before)
        manifests = manifests_in(target)
        if manifests[target] != plans[target] and not manifests[target].ranges[-1].is_of(source):
            raise ValueError(f"another command has packed other images to {shown(target)} meanwhile: repeat this one")
        return Plan(manifests, reading.train.listing.place)


def _upload(plans: dict[Path, Manifest], folder: Path, target: Path, before: dict[Path, Manifest]) -> None:
    """Uploads what is new in a plan whose listings are in a folder."""
    with stage(f"uploading the list of images to {shown(target)}"):
        if not before and target / "test" not in plans:  # of a command that was given up
            remove([target / "test" / "manifest.json"])
        for there, manifest in reversed(plans.items()):
            if manifest != before.get(there):
                listing, range_ = listing_path(there, manifest.ranges[-1].first), manifest.ranges[-1]
                send(folder / listing.relative_to(target), listing, range_.listing_sha256)
                put = write if before or there != target else create  # of two plans, the first counts
                put(there / "manifest.json", manifest.content)


def _wait_for_the_plan(target: Path, first: str) -> None:
    if not is_packed(target):
        say(Remark(f"waiting for part {first}, which lists the images", path=shown(target)))
    with stage(f"waiting for part {first}, which lists the images"):
        while not is_packed(target):
            time.sleep(_LOOK_SECONDS)
