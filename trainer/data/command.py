"""What the commands of `python -m trainer.data` do; their arguments are those of `trainer.data.__main__`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from trainer.data.bucket_packs import claimed, staging, upload_pack, verify_in_bucket
from trainer.data.bucket_parts import merge_in_bucket, pack_part
from trainer.data.config import SourceOptions
from trainer.data.inspection import inspect_source
from trainer.data.manifest import Manifest, is_packed, packs_in
from trainer.data.pack import PackOptions, pack, verify
from trainer.data.pack_on_ray import pack_on_ray
from trainer.data.pack_parts import merge
from trainer.data.parts import check_part_arguments
from trainer.data.reading import counted
from trainer.data.source_arguments import source_options
from trainer.display import shown, stage
from trainer.stopping import exit_on_error
from weightserver.common.object_store import is_remote
from weightserver.common.object_store import shown as shown_path


def run(options: argparse.Namespace) -> NoReturn:
    """Runs a command. Exit status 0; 1 with one line on stderr on failure."""
    commands = {"inspect": _inspect, "pack": _pack, "pack merge": _merge, "verify": _verify}
    with exit_on_error(f"pic {options.command}", after_interrupt="repeat the command to continue"):
        with shown():
            lines = commands[options.command](options)
        print(*lines, sep="\n")
    sys.exit(0)


def _inspect(options: argparse.Namespace) -> list[str]:
    with stage("looking into the images"):
        return list(inspect_source(options.source, source_options(options)))


def _pack(options: argparse.Namespace) -> list[str]:
    check_part_arguments(options)
    target, of_source = options.output, source_options(options)
    if not is_remote(target):
        return _pack_images(options)
    if has_pack := not is_remote(options.source) and is_packed(options.source):
        if options.extend or options.part or options.engine or options.order_seed is not None or of_source.given:
            raise ValueError(f"{options.source} holds packed images, which are uploaded as they are: omit the options")
        place = claimed(target, options.source.resolve())
    elif options.part or options.engine:
        return _pack_images(options)
    else:
        place = staging(target, of_source, extend=options.extend)
    with place as options.output:
        lines = [_packed(options.output, Manifest.load(options.output))] if has_pack else _pack_images(options)
        with stage(f"uploading to {shown_path(target)}"):
            upload_pack(options.output, target)
    return [*lines, f"{shown_path(target)} holds the pack; {options.output} is not needed any more"]


def _pack_images(options: argparse.Namespace) -> list[str]:
    of_source = source_options(options, Manifest.load(options.output).options if is_packed(options.output) else None)
    how = PackOptions(
        order_seed=options.order_seed,
        extend=options.extend,
        threads=options.threads,
        source=of_source,
        part=options.part,
    )
    if options.engine:
        manifest = pack_on_ray(options.source, options.output, how, options.address)
    elif is_remote(options.output):
        manifest = pack_part(options.source, options.output, how)
    else:
        manifest = pack(options.source, options.output, how)
    output = shown_path(options.output)
    if not manifest.complete:
        images = counted(manifest.ranges[-1].count, "image")
        merging = f"pic pack merge {output}" + (" --cache-dir DIR" if is_remote(options.output) else "")
        return [f"{output}: part {how.part} of {images}; '{merging}' joins all parts"]
    return [_packed(options.output, manifest)]


def _packed(output: Path, manifest: Manifest) -> str:
    """What a pack holds."""
    broken = sum(shard.num_broken for shard in manifest.shards)
    labels = counted(len(manifest.classes), "named class", "es") if manifest.classes else "numbered classes"
    return (
        f"{shown_path(output)}: {counted(manifest.num_images, 'image')} in {len(manifest.ranges)} range(s), "
        f"{labels if manifest.labelled else 'no labels'}, {counted(len(manifest.shards), 'tar')}, "
        f"{sum(shard.bytes for shard in manifest.shards) / 2**20:,.1f} MiB, {broken} broken and substituted"
    )


def _merge(options: argparse.Namespace) -> list[str]:
    directory = options.directory
    with stage("joining the parts"):
        if is_remote(directory):
            return [_packed(directory, merge_in_bucket(directory, SourceOptions(cache_dir=options.cache_dir)))]
        if options.cache_dir:
            raise ValueError("--cache-dir is for a pack in a bucket: omit it")
        return [_packed(directory, merge(directory))]


def _verify(options: argparse.Namespace) -> list[str]:
    directory = options.directory
    with stage("comparing checksums"):
        compare = verify_in_bucket if is_remote(directory) else verify
        wrong = [line for one in packs_in(directory) or [directory] for line in compare(one)]
    if wrong:
        raise ValueError("; ".join(wrong))
    return [f"{shown_path(directory)}: all files match their checksums"]
