"""Packs images by a Ray cluster: each task a part, then the parts are joined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, merge, pack
from trainer.data.parts import WHOLE, Part
from trainer.data.planning import planned_pack
from trainer.display import counting, stage
from trainer.ray_tasks import MOST_PARTS, on_ray
from weightserver.common.object_store import absolute


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
