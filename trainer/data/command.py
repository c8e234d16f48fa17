"""What the commands of `python -m trainer.data` do; their arguments are those of `trainer.data.__main__`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from trainer.data.bucket_packs import upload_pack
from trainer.data.config import SourceOptions
from trainer.data.inspection import inspect_source
from trainer.data.manifest import Manifest, is_packed, packs_in
from trainer.data.pack import PackOptions, merge, pack, pack_on_ray, verify
from trainer.data.parts import check_part_arguments
from trainer.data.reading import check_source, counted
from trainer.data.source_arguments import source_options
from trainer.display import shown, stage
from trainer.stopping import exit_on_error
from weightserver.common.logs import printable
from weightserver.common.object_store import is_remote
from weightserver.common.object_store import shown as shown_path


def run(options: argparse.Namespace) -> NoReturn:
    """Runs a command. Exit status 0; 1 with one line on stderr on failure."""
    commands = {"inspect": _inspect, "pack": _pack, "pack merge": _merge, "verify": _verify}
    with exit_on_error(f"pic {options.command}", after_interrupt="repeat the command to continue"):
        with shown():
            lines = commands[options.command](options)
        print(*map(printable, lines), sep="\n")
    sys.exit(0)


def _inspect(options: argparse.Namespace) -> list[str]:
    with stage("looking into the images"):
        return list(inspect_source(options.source, source_options(options)))


def _pack(options: argparse.Namespace) -> list[str]:
    check_part_arguments(options)
    source, output = options.source, options.output
    check_source(source)
    if is_remote(output) and source == output:
        raise ValueError(f"{shown_path(output)} is the source itself: give another place")
    if is_remote(output) and options.part and options.extend:
        raise ValueError("--extend adds images to a pack in a bucket by one process: omit --part")
    if is_remote(output) and not is_remote(source) and is_packed(source):
        return _upload(options)
    of_source = source_options(options, Manifest.load(output).options if is_packed(output) else None)
    how = PackOptions(
        order_seed=options.order_seed,
        extend=options.extend,
        threads=options.threads,
        source=of_source,
        part=options.part,
    )
    manifest = pack_on_ray(source, output, how, options.address) if options.engine else pack(source, output, how)
    if manifest.complete:
        return [_packed(output, manifest)]
    images = counted(manifest.ranges[-1].count, "image")
    merging = f"pic pack merge {shown_path(output)}" + (" --cache-dir DIR" if is_remote(output) else "")
    return [f"{shown_path(output)}: part {how.part} of {images}; '{merging}' joins all parts"]


def _upload(options: argparse.Namespace) -> list[str]:
    here, there = options.source, options.output
    of_packing = options.extend or options.part or options.engine or options.order_seed is not None
    if of_packing or source_options(options).given:
        raise ValueError(f"{here} holds packed images, which are uploaded as they are: omit the options")
    with stage(f"uploading to {shown_path(there)}"):
        upload_pack(here, there)
    return [_packed(here, Manifest.load(here)), f"{shown_path(there)} holds the pack; {here} is not needed any more"]


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
        if options.cache_dir and not is_remote(directory):
            raise ValueError("--cache-dir is for a pack in a bucket: omit it")
        return [_packed(directory, merge(directory, SourceOptions(cache_dir=options.cache_dir)))]


def _verify(options: argparse.Namespace) -> list[str]:
    directory = options.directory
    with stage("comparing checksums"):
        wrong = [line for one in sorted({directory, *packs_in(directory)}) for line in verify(one)]
    if wrong:
        raise ValueError("; ".join(wrong))
    return [f"{shown_path(directory)}: all files match their checksums"]
