"""Packs images in the order in which they are visited, verifies packed images, and previews augmentations.

python -m trainer.data pack images/train packed/                # repeat it to continue after an interruption
python -m trainer.data pack more-images packed/ --extend        # new images get the ids after the old ones
python -m trainer.data verify packed/
python -m trainer.data preview images/train --output preview.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from trainer.cores import usable_cores
from trainer.data.datasets import load_dataset
from trainer.data.manifest import is_packed
from trainer.data.pack import PackOptions, pack, verify
from trainer.data.preview import write_preview
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import to_path


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; 1 with one line on stderr on failure; 2 for invalid arguments."""
    options = _parser().parse_args(arguments)
    with exit_on_error("trainer.data"):
        try:
            {"pack": _pack, "verify": _verify, "preview": _preview}[options.command](options)
        except KeyboardInterrupt:
            print("trainer.data: interrupted: repeat the command to continue", file=sys.stderr)
            sys.exit(130)
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.data", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    packing = commands.add_parser("pack", help="pack images, or continue an interrupted pack")
    packing.add_argument(
        "source", type=to_path, help="a folder of images, of class folders or of class tars, or a list"
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

    verifying = commands.add_parser("verify", help="compare packed files with their checksums")
    verifying.add_argument("directory", type=to_path)

    preview = commands.add_parser("preview", help="draw views by the paper's augmentation and by the weak one")
    preview.add_argument("source", type=to_path, help="images as for pack, or a packed directory")
    preview.add_argument(
        "--output", type=to_path, default=Path("preview.png"), metavar="PNG", help="file (default preview.png)"
    )
    preview.add_argument("--image-size", type=int, default=224, metavar="PX", help="side of a view (default 224)")
    preview.add_argument("--images", type=int, default=4, metavar="N", help="number of images (default 4)")
    preview.add_argument("--views", type=int, default=8, metavar="N", help="views of each image (default 8)")
    preview.add_argument("--seed", type=int, default=0, help="seed of the views (default 0)")
    return parser


def _mib(text: str) -> int:
    """Converts MiB to bytes."""
    try:
        return round(float(text) * 2**20)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text} is not a number of MiB") from None


def _pack(options: argparse.Namespace) -> None:
    columns = (BarColumn(), TaskProgressColumn(), MofNCompleteColumn(), TextColumn("images"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", visible=False)
        manifest = pack(
            options.source,
            options.output,
            PackOptions(
                order_seed=options.order_seed,
                shard_bytes=options.shard_bytes,
                labelled=not options.no_labels,
                extend=options.extend,
                threads=options.threads,
                max_broken=options.max_broken,
                on_rows=lambda done, count: progress.update(task, completed=done, total=count, visible=True),
                on_broken=lambda line: progress.console.print(line, markup=False, highlight=False, soft_wrap=True),
            ),
        )
    broken = sum(len(shard.substitutes) for shard in manifest.shards)
    labels = f"{len(manifest.classes):,} named classes" if manifest.classes else "numbered classes"
    print(
        f"{options.output}: {manifest.num_images:,} images in {len(manifest.ranges)} range(s), "
        f"{labels if manifest.labelled else 'no labels'}, {len(manifest.shards):,} tars, "
        f"{sum(shard.bytes for shard in manifest.shards) / 2**20:,.1f} MiB, {broken} broken and substituted"
    )


def _verify(options: argparse.Namespace) -> None:
    if wrong := verify(options.directory):
        raise ValueError("; ".join(wrong))
    print(f"{options.directory}: all files match their checksums")


def _preview(options: argparse.Namespace) -> None:
    dataset = load_dataset(
        "packed" if is_packed(options.source) else "folder", options.source, image_size=options.image_size
    )
    write_preview(
        dataset.train_images,
        options.output,
        image_size=options.image_size,
        num_images=options.images,
        num_views=options.views,
        seed=options.seed,
    )
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
