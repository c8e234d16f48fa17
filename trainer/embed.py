"""Computes the features of images with a trained encoder, and writes them with the images' paths.

    pic embed runs/a pictures/ --output features.parquet
    pic embed runs/a/encoder.safetensors list.txt --output features.npz
    pic embed runs/a packed/ --output features/ --part 2/64

The images are a folder, an archive, a list of paths or a packed directory; they need no labels. All splits of a source
are written. Each image is prepared as in an evaluation: its shorter side is resized to 256/224 of the encoder's image
size, and the centre is taken. Images that cannot be read are reported and left out. The output has the columns path,
split (of a source with splits) and vector, float32, in the order of the images: a Parquet file (needs pyarrow, the
extra `parquet`), written while features are computed, or .npz of NumPy, which keeps all of them in memory first. With
--part or --engine the output is a folder of Parquet files, one for each part, which are read together; of a pack, each
part reads its own tars.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from trainer.command_line import parsed
from trainer.loading import loading_libraries
from weightserver.common.atomic_files import to_path
from weightserver.common.command_line import CommandParser
from weightserver.common.object_store import to_location


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; 1 with one line on stderr on failure; 2 for invalid arguments."""
    with loading_libraries("trainer.embed"):
        parser = _parser()
    options = parsed(parser, arguments)
    with loading_libraries("trainer.embed"):
        from trainer.embedding import run
    run(options)


def _parser() -> argparse.ArgumentParser:
    from trainer.data.parts import add_part_arguments
    from trainer.data.source_arguments import add_source_arguments

    parser = CommandParser(prog="pic embed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "encoder", type=to_path, metavar="RUN", help="a run's directory, or an encoder's file or export"
    )
    parser.add_argument("images", type=to_location, help="a folder of images, a list of paths, or a packed directory")
    parser.add_argument("--output", type=to_path, required=True, help="a new file: .parquet or .npz; of parts a folder")
    parser.add_argument("--checkpoint", help="step-…, a checkpoint of the run (default: its end, or the newest)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--decode-threads", type=int, help="decoding threads (default: one per core, at most 16)")
    add_part_arguments(parser)
    add_source_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
