"""Packs images in the order in which they are visited, so that a window of rows is a contiguous range of files.

Row r of a range holds the image that `RangesOrder` assigns to it, in tars of a bounded size that webdataset can read;
`manifest.py` describes the format. Every image is decoded once. A broken image is reported and replaced by the next
intact one by id (after the last of its range, the first), under its own label. All tars of a range have the same number
of rows, but for the last. The packed files are a function of the listing, the order's seed and this number: a pack that
was killed and continued, or made in parts, has the same bytes, on a disk and in a bucket.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from trainer.data.config import SourceOptions
from trainer.data.finished_tars import FinishedTars, backend_of, joined_meanwhile, listing_of
from trainer.data.manifest import LOCK, Manifest, index_path, manifests_in, shards_path
from trainer.data.pack_plan import PackOptions as PackOptions
from trainer.data.packer import Packer
from trainer.data.parts import WHOLE, Part
from trainer.data.planning import planned_pack
from trainer.data.reading import counted
from trainer.display import counting, stage
from trainer.ray_tasks import MOST_PARTS, on_ray
from weightserver.common.atomic_files import locked
from weightserver.common.object_store import absolute, is_remote, shown
from weightserver.common.threads import in_other_thread


def pack(source: Path, target: Path, options: PackOptions) -> Manifest:
    """Packs the images of `source` into a directory or a place in a bucket, or the part of `options` of them, as far as
    its tars are not there.

    Test images of a source with splits are packed into `target`/test. The images are listed once: images that are added
    to `source` later are included by `extend`, which gives new ids to images whose paths are new. Packing a complete
    pack does nothing. Returns the manifest of the training images; that of a part has no tars before `merge`.

    Raises:
        ValueError: a source without images, a place that holds another pack, too many broken images; a bucket that
            refuses or does not answer.
        OSError: a disk cannot be written, or another process packs into the directory.
    """
    part = options.part or WHOLE
    with planned_pack(source, target, options) as plan:
        unfinished = {there: each for there, each in plan.manifests.items() if not each.complete}
        backend = backend_of(target)
        if unfinished:
            with (
                backend.work_folder(target, f"{part.number}-of-{part.of}", options.source) as folder,
                counting("packing") as progress,
                stage("packing"),
            ):
                for there, manifest in unfinished.items():
                    tars = FinishedTars(there, manifest, part)
                    listing = listing_of(there, manifest.ranges[-1], options.source)
                    Packer(manifest, listing, plan.place, options, tars, folder, progress).run()
        if options.part:
            return plan.manifests[target]
        with stage("joining the tars"):
            return _merged(target, options.source)


def pack_on_ray(source: Path, output: Path, options: PackOptions, address: str | None) -> Manifest:
    """Packs the images of `source` into `output` as `pack` does, on the cluster at an address of `on_ray`.

    Raises:
        ValueError, OSError: as `pack`, `merge` and `on_ray`.
    """
    source, output = absolute(source), absolute(output)
    paths = {name: getattr(options.source, name) for name in ("cache_dir", "broken_list")}
    there = {name: path.resolve() for name, path in paths.items() if path}  # a worker has another working directory
    options = replace(options, source=replace(options.source, **there))
    with stage("listing the images"), planned_pack(source, output, replace(options, part=WHOLE)) as plan:
        manifests = plan.manifests.values()
    if all(manifest.complete for manifest in manifests):
        return merge(output, options.source)
    of = min(MOST_PARTS, max(manifest.ranges[-1].num_tars for manifest in manifests))

    def task(part: Part) -> None:
        pack(source, output, replace(options, part=part, threads=1, extend=False))

    with stage("packing"), counting("parts", of) as progress:
        on_ray(task, of, progress.advance, address=address)
    return merge(output, options.source)


def merge(target: Path, options: SourceOptions | None = None) -> Manifest:
    """Joins the tars of a pack, and of its test images; reads and copies no tar. One that is joined stays as it is.

    Args:
        options: where files for a bucket are kept meanwhile.

    Returns the manifest of the training images.

    Raises:
        ValueError: tars that are missing, and nothing is changed, or that are lost since they were joined; a bucket
            that refuses or does not answer.
        OSError: the disk cannot be written, or another process packs there.
    """
    Manifest.load(target)  # which says that there is none, before a lock is made there
    with nullcontext() if is_remote(target) else locked(target / LOCK, wait=False):
        return _merged(target, options or SourceOptions())


def _merged(target: Path, options: SourceOptions) -> Manifest:
    manifests, backend = manifests_in(target), backend_of(target)
    unfinished = [FinishedTars(there, each) for there, each in reversed(manifests.items()) if not each.complete]
    for tars in unfinished:
        if tars.missing:
            if Manifest.load(tars.there).complete:
                raise joined_meanwhile(tars.there)
            raise ValueError(
                f"{len(tars.missing):,} of {counted(tars.range.num_tars, 'tar')} of {shown(tars.there)} missing, first "
                f"that of row {tars.missing[0]:,} of {tars.range.count:,}: repeat 'pic pack SOURCE {shown(target)}', "
                "with --part I/N for the parts that did not end"
            )
    if unfinished:
        with backend.work_folder(target, "merge", options) as folder:
            places = [folder / tars.there.relative_to(target) for tars in unfinished]
            joined = in_other_thread(lambda: list(map(FinishedTars.joined, unfinished, places)))
            for tars, range_ in zip(unfinished, joined, strict=True):
                digests = range_.digests(tars.there)
                for path in (index_path(tars.there, range_.first), shards_path(tars.there, range_.first)):
                    backend.keep(folder / path.relative_to(target), path, digests[path])
    finished = manifests_in(target)
    for there, manifest in finished.items():
        if manifest.complete:  # else another command packs more images by now, and has notes of these there
            backend.clear(there)
        backend.check(there, manifest)
    return finished[target].finished


def verify(directory: Path) -> list[str]:
    """Compares the files of a pack with the manifest: on a disk their content, in a bucket the lengths of tars and the
    SHA-256 that uploads noted. Returns a line for each that differs, and one for a pack that is not finished."""
    manifest = Manifest.load(directory)
    unfinished = f"{shown(directory)} is not finished: repeat the command that packs it; 'pic pack merge' joins parts"
    return [*([] if manifest.complete else [unfinished]), *backend_of(directory).damage(directory, manifest)]
