"""Packs images by a Ray cluster: each task a part, then the parts are joined."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.data.bucket_parts import merge_in_bucket, pack_in_bucket, plan_in_bucket
from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, Plan, pack, planned_pack
from trainer.data.pack_parts import merge
from trainer.data.parts import WHOLE, Part
from trainer.display import counting, stage
from trainer.ray_tasks import MOST_PARTS, on_ray
from weightserver.common.object_store import absolute, is_remote


def pack_on_ray(source: Path, output: Path, options: PackOptions, address: str | None) -> Manifest:
    """Packs the images of `source` into `output` as `pack` does, on the cluster at an address of `on_ray`.

    Raises:
        ValueError, OSError: as `pack`, `merge` and `on_ray`.
    """
    source, output = absolute(source), absolute(output)
    if cache := options.source.cache_dir:  # a worker has another working directory
        options = replace(options, source=replace(options.source, cache_dir=cache.resolve()))
    plan, pack_a_part = (plan_in_bucket, pack_in_bucket) if is_remote(output) else (_plan, pack)
    join = partial(merge_in_bucket, options=options.source) if is_remote(output) else merge
    with stage("listing the images"):
        manifests = plan(source, output, options).manifests.values()
    if all(manifest.complete for manifest in manifests):
        return join(output)
    of = min(MOST_PARTS, max(manifest.ranges[-1].num_tars for manifest in manifests))

    def task(part: Part) -> None:
        pack_a_part(source, output, replace(options, part=part, threads=1, extend=False))

    with stage("packing"), counting("parts", of) as progress:
        on_ray(task, of, progress.advance, address=address)
    return join(output)


def _plan(source: Path, output: Path, options: PackOptions) -> Plan:
    with planned_pack(source, output, replace(options, part=WHOLE)) as plan:
        return plan
