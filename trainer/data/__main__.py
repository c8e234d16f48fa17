"""Inspects sources of images, packs images in the order of their visits, and verifies packs.

pic inspect images/                          # what they are read as, and what they are
pic pack images/train packed/                # repeat it to continue after an interruption
pic pack more-images packed/ --extend        # new images get the ids after the old ones
pic pack images/train packed/ --part 2/8     # one of eight processes, each with a part
pic pack merge packed/                       # when all parts are packed
pic pack images/ s3://bucket/packed --cache-dir /nvme/images              # or in parts, and then
pic pack merge s3://bucket/packed --cache-dir /nvme/images
pic pack packed/ s3://bucket/packed          # uploads it
pic verify packed/
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from trainer.command_line import parsed
from trainer.loading import loading_libraries
from weightserver.common.atomic_files import to_path
from weightserver.common.command_line import CommandParser, Parser
from weightserver.common.object_store import to_location


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; 1 with one line on stderr on failure; 2 for invalid arguments."""
    with loading_libraries("trainer.data"):
        parser = _parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:2] == ["pack", "merge"]:
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    options = parsed(parser, arguments)
    with loading_libraries("trainer.data"):
        from trainer.data.command import run
    run(options)


def _parser() -> argparse.ArgumentParser:
    from trainer.cores import usable_cores
    from trainer.data.parts import add_part_arguments
    from trainer.data.source_arguments import add_source_arguments

    parser = Parser(prog="pic", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser)

    inspecting = commands.add_parser("inspect", help="say what a source is read as, and what its images are")
    inspecting.add_argument("source", type=to_location, help="images as for pack")
    add_source_arguments(inspecting)

    packing = commands.add_parser("pack", help="pack images, or continue an interrupted pack")
    packing.add_argument(
        "source",
        type=to_location,
        help="a folder of images, class folders, tars or splits; an archive; or a list; on a disk or at s3://; "
        "or a pack to upload",
    )
    packing.add_argument("output", type=to_location, help="the packed directory, or s3://BUCKET/PACK")
    packing.add_argument("--order-seed", type=int, metavar="SEED", help="the trainer's --order-seed (default 0)")
    packing.add_argument("--extend", action="store_true", help="add the images that are not packed yet, as new ids")
    packing.add_argument("--threads", type=int, default=usable_cores(), help="decoding threads (default one per core)")
    add_part_arguments(packing)
    add_source_arguments(packing)

    merging = commands.add_parser("pack merge", help="join the parts that pack --part has packed")
    merging.add_argument("directory", type=to_location, help="the packed directory, or s3://BUCKET/PACK")
    merging.add_argument(
        "--cache-dir", type=to_path, metavar="DIR", help="for one in a bucket: where its index is joined"
    )

    verifying = commands.add_parser("verify", help="compare packed files with their checksums")
    verifying.add_argument("directory", type=to_location, help="the packed directory, or s3://BUCKET/PACK")
    return parser


if __name__ == "__main__":
    main()
