"""Exports a run's rows with their images, or its encoder for another library, or imports another trainer's encoder.

    pic export rows runs/a --output rows/ --checkpoint step-000000001000
    pic export encoder runs/a --format timm --output encoder/
    pic export import moco_v2.pth.tar --model torchvision:resnet50 --output moco.safetensors

Rows: as `weightserver export`, with one more column: image int64 [n], the image's index in the data set. A row is its
image's position in the random order of the run's order_seed. For images in files there is also images.csv: row, image
and path of the image's file, in the order of the rows. The rows come from the run's weight servers: those of its
--servers, or its local ones, which are started for the export. The run's TLS and token options apply unless the command
has its own. Encoder: see `trainer.export.encoders`. Import: see `trainer.export.importing`; the file that it writes is
one for `trainer.model.load_encoder`, as a run's encoder.safetensors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from trainer.command_line import parsed
from trainer.display import shown, stage
from trainer.export import LIBRARIES
from trainer.loading import loading_libraries
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import make_directory, to_path
from weightserver.common.command_line import CommandParser, Parser
from weightserver.common.object_store import to_location


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; 1 with one line on stderr on failure; 2 for invalid arguments."""
    with loading_libraries("trainer.export"):
        parser = _parser()
    options = parsed(parser, arguments)
    with loading_libraries("trainer.export"):
        import trainer.export.encoders
        import trainer.export.importing
        import trainer.export.paths  # noqa: F401  (all that the commands import takes its time here)
    with exit_on_error("trainer.export"):
        with shown(), stage(options.stage):
            text = options.export(options)
        print(text)
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    from weightserver import ClientSecurity
    from weightserver.common.options import add_options
    from weightserver.operations.export import add_export_options

    parser = Parser(prog="pic export", description=(__doc__ or "").splitlines()[0])
    what = parser.add_subparsers(dest="what", required=True, parser_class=CommandParser)
    rows = what.add_parser("rows", help="export rows, current or of a checkpoint, with their images")
    rows.add_argument("run", type=to_path, help="the run's directory")
    rows.add_argument("--servers", help="host:port,host:port of all weight servers (default: the run's)")
    add_options(rows, ClientSecurity)
    add_export_options(rows)
    rows.add_argument("--data-dir", type=to_location, help="where the run's images are now (default: as in the run)")
    rows.set_defaults(stage="exporting the rows", export=_export_rows)
    encoder = what.add_parser("encoder", help="export the encoder under another library's names, with a model card")
    encoder.add_argument("run", type=to_path, help="the run's directory")
    encoder.add_argument("--format", choices=LIBRARIES, required=True, help="the library that will load it")
    encoder.add_argument("--output", type=to_path, required=True, help="a new directory")
    encoder.add_argument("--checkpoint", default="", help="step-…, a checkpoint of the run (default: its end)")
    encoder.add_argument("--licence", default="unknown", help="licence of the weights, for the model card")
    encoder.set_defaults(stage="exporting the encoder", export=_export_encoder)
    _add_import(what.add_parser("import", help="import an encoder from a weights file of another trainer or library"))
    return parser


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=to_path, help="a checkpoint (.pth, .pt, .tar) or a safetensors file")
    parser.add_argument("--model", metavar="NAME", required=True, help="torchvision:NAME or timm:NAME")
    parser.add_argument("--output", type=to_path, required=True, metavar="FILE", help="a new encoder file")
    parser.add_argument(
        "--image-size", type=int, default=224, metavar="PIXELS", help="side of its images (default: 224)"
    )
    parser.add_argument("--in-channels", type=int, default=3, choices=(1, 3), help="grey or colour images (default: 3)")
    for name, what in (("mean", "mean of pixels in 0..1"), ("std", "standard deviation of pixels")):
        text = f"{what}: one number, or one for each channel (default: ImageNet's)"
        parser.add_argument(f"--pixel-{name}", type=float, nargs="+", metavar="NUMBER", help=text)
    parser.add_argument(
        "--prefix", help="which encoder of several: its keys' prefix, or a part of it, as encoder_k or teacher"
    )
    parser.set_defaults(stage="importing the encoder", export=_import_encoder)


def _import_encoder(options: argparse.Namespace) -> str:
    from trainer.export.importing import import_encoder, library_config
    from trainer.model import save_encoder

    if options.output.exists():
        raise ValueError(f"{options.output} exists: give another --output")
    config = library_config(
        options.model,
        image_size=options.image_size,
        in_channels=options.in_channels,
        pixel_mean=options.pixel_mean,
        pixel_std=options.pixel_std,
    )
    imported = import_encoder(options.file, config, prefix=options.prefix)
    make_directory(options.output.parent)
    save_encoder(imported.encoder, config, options.output)
    return "\n".join([*imported.notes, f"wrote {options.output}"])


def _export_encoder(options: argparse.Namespace) -> str:
    from trainer.export.encoders import export_encoder

    written = export_encoder(
        options.run, options.format, options.output, checkpoint=options.checkpoint, licence=options.licence
    )
    return _number_written(written, options.output)


def _number_written(files: list[Path], directory: Path) -> str:
    return f"wrote {len(files)} files to {directory}"


def _export_rows(options: argparse.Namespace) -> str:
    from trainer.data import DECODED
    from trainer.export.paths import write_paths
    from trainer.run.resume import run_settings
    from trainer.run.stored_rows import open_stored_rows
    from weightserver.operations.export import export_rows

    with open_stored_rows(options) as stored:
        rows = options.rows or range(stored.num_images)
        if rows.stop > stored.num_images:
            raise ValueError(
                f"rows {rows.start}:{rows.stop} have no images: {options.run} has rows 0:{stored.num_images}"
            )
        written = export_rows(
            stored.client,
            options.output,
            rows=rows,
            checkpoint=options.checkpoint,
            step=options.step,
            file_format=options.format,
            more_columns=lambda rows: {stored.unit: stored.order.images(rows)},
        )
        text = _number_written(written, options.output)
        if stored.unit != "image" or run_settings(options.run).data.dataset not in DECODED:
            return text
        try:
            number = write_paths(options.run, stored, rows, options.output / "images.csv", options.data_dir)
        except (ValueError, OSError) as error:
            return f"{text}; without images.csv, as the images' paths are unknown: {error}"
        return f"{text}, and {number:,} paths to {options.output / 'images.csv'}"


if __name__ == "__main__":
    main()
