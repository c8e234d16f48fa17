"""Inspects sources of images, packs images in the order of their visits, verifies packs, and previews augmentations.

pic inspect images/                          # what they are read as, and what they are
pic pack images/train packed/                # repeat it to continue after an interruption
pic pack more-images packed/ --extend        # new images get the ids after the old ones
pic verify packed/
pic preview images/train --output preview.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from trainer.command_line import parsed
from trainer.cores import usable_cores
from trainer.data.changes import changes_since
from trainer.data.datasets import load_dataset
from trainer.data.inspection import inspect_source
from trainer.data.manifest import is_packed
from trainer.data.pack import PackOptions, verify
from trainer.data.pack_progress import pack_with_progress
from trainer.data.preview import ViewsOfRun, at_size, views_of_run, write_preview
from trainer.data.reading import read_source
from trainer.data.source_arguments import add_source_arguments, source_options
from trainer.display import shown, stage
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import to_path
from weightserver.common.command_line import CommandParser, Parser


def run(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; 1 with one line on stderr on failure; 2 for invalid arguments."""
    options = parsed(_parser(), arguments)
    with exit_on_error("trainer.data", after_interrupt="repeat the command to continue"):
        with shown():
            lines = {"inspect": _inspect, "pack": _pack, "verify": _verify, "preview": _preview}[options.command](
                options
            )
        print(*lines, sep="\n")
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="pic", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser)

    inspecting = commands.add_parser("inspect", help="say what a source is read as, and what its images are")
    inspecting.add_argument("source", type=to_path, help="images as for pack")
    add_source_arguments(inspecting)

    packing = commands.add_parser("pack", help="pack images, or continue an interrupted pack")
    packing.add_argument(
        "source", type=to_path, help="a folder of images, class folders, tars or splits; an archive; or a list"
    )
    packing.add_argument("output", type=to_path, help="the packed directory")
    packing.add_argument("--order-seed", type=int, metavar="SEED", help="the trainer's --order-seed (default 0)")
    packing.add_argument("--extend", action="store_true", help="add the images that are not packed yet, as new ids")
    packing.add_argument("--no-labels", action="store_true", help="discard labels")
    packing.add_argument("--shard-mib", type=_mib, dest="shard_bytes", metavar="MIB", help="largest tar (default 256)")
    packing.add_argument("--threads", type=int, default=usable_cores(), help="decoding threads (default one per core)")
    packing.add_argument(
        "--max-broken",
        type=int,
        metavar="N",
        help="maximum number of broken images (default 1 %%, at least 100)",
    )

    add_source_arguments(packing)

    verifying = commands.add_parser("verify", help="compare packed files with their checksums")
    verifying.add_argument("directory", type=to_path)

    preview = commands.add_parser("preview", help="draw views by the paper's augmentation and by the weak one")
    preview.add_argument("source", type=to_path, help="images as for pack, or a packed directory")
    preview.add_argument(
        "--output", type=to_path, default=Path("preview.png"), metavar="PNG", help="file (default preview.png)"
    )
    preview.add_argument("--run", type=to_path, metavar="DIR", help="draw views as this run does, instead of both")
    preview.add_argument("--image-size", type=int, metavar="PX", help="side of a view (default: the run's, or 224)")
    preview.add_argument("--background", metavar="COLOUR", help="what transparent pixels show (default: white)")
    preview.add_argument("--images", type=int, default=4, metavar="N", help="number of images (default 4)")
    preview.add_argument("--views", type=int, default=8, metavar="N", help="views of each image (default 8)")
    preview.add_argument("--seed", type=int, default=0, help="seed of the views (default 0)")
    add_source_arguments(preview)
    return parser


def _mib(text: str) -> int:
    """Converts MiB to bytes."""
    try:
        return round(float(text) * 2**20)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text} is not a number of MiB") from None


def _inspect(options: argparse.Namespace) -> list[str]:
    with stage("looking into the images"):
        return list(inspect_source(options.source, source_options(options)))


def _pack(options: argparse.Namespace) -> list[str]:
    of_source = source_options(options)
    manifest = pack_with_progress(
        options.source,
        options.output,
        PackOptions(
            order_seed=options.order_seed,
            shard_bytes=options.shard_bytes,
            labelled=not options.no_labels,
            extend=options.extend,
            threads=options.threads,
            max_broken=options.max_broken,
            source=of_source,
        ),
    )
    broken = sum(len(shard.substitutes) for shard in manifest.shards)
    labels = _counted(len(manifest.classes), "named class", "es") if manifest.classes else "numbered classes"
    packed = (
        f"{options.output}: {_counted(manifest.num_images, 'image')} in {len(manifest.ranges)} range(s), "
        f"{labels if manifest.labelled else 'no labels'}, {_counted(len(manifest.shards), 'tar')}, "
        f"{sum(shard.bytes for shard in manifest.shards) / 2**20:,.1f} MiB, {broken} broken and substituted"
    )
    if not options.source.exists():
        return [packed]
    with stage("comparing the source with the pack"):
        reading = read_source(options.source.resolve(), of_source)
        changed = [changes_since(split, part).lines() for split, part in reading.to_pack(options.output)]
    return [packed, *(line for lines in changed for line in lines)]


def _counted(number: int, noun: str, ending: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def _verify(options: argparse.Namespace) -> list[str]:
    with stage("comparing checksums"):
        wrong = verify(options.directory)
    if wrong:
        raise ValueError("; ".join(wrong))
    return [f"{options.directory}: all files match their checksums"]


def _preview(options: argparse.Namespace) -> list[str]:
    with stage("drawing views"):
        _draw_preview(options)
    return [f"wrote {options.output}"]


def _draw_preview(options: argparse.Namespace) -> None:
    views = views_of_run(options.run) if options.run else ViewsOfRun()
    image_size = options.image_size or views.image_size
    dataset = load_dataset(
        "packed" if is_packed(options.source) else "folder",
        options.source,
        image_size=image_size,
        background=options.background or views.background,
        options=source_options(options),
    )
    write_preview(
        dataset.train_images,
        options.output,
        image_size=image_size,
        augmentations=views.augmentations or at_size(image_size),
        num_images=options.images,
        num_views=options.views,
        seed=options.seed,
    )
