"""What the commands of `python -m trainer.export` do; their arguments are those of `trainer.export.__main__`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from trainer.data import DECODED
from trainer.display import shown, stage
from trainer.export.encoders import export_encoder
from trainer.export.importing import ImportOptions, import_encoder
from trainer.export.paths import write_paths
from trainer.model import save_encoder
from trainer.run.directory import read_config
from trainer.run.stored_rows import open_stored_rows
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import make_directory
from weightserver.operations.export import export_rows


def run(options: argparse.Namespace) -> NoReturn:
    """Runs a command. Exit status 0; 1 with one line on stderr on failure."""
    export = {"rows": _export_rows, "encoder": _export_encoder, "import": _import_encoder}[options.what]
    with exit_on_error("trainer.export"):
        with shown(), stage(options.stage):
            text = export(options)
        print(text)
    sys.exit(0)


def _import_encoder(options: argparse.Namespace) -> str:
    if options.output.exists():
        raise ValueError(f"{options.output} exists: give another --output")
    mean, std = (numbers and tuple(numbers) for numbers in (options.pixel_mean, options.pixel_std))
    described = ImportOptions(
        name=options.model,
        image_size=options.image_size,
        in_channels=options.in_channels,
        pixel_mean=mean,
        pixel_std=std,
    )
    imported = import_encoder(options.file, described, prefix=options.prefix)
    make_directory(options.output.parent)
    save_encoder(imported.encoder, imported.config, options.output)
    return "\n".join([*imported.notes, f"wrote {options.output}"])


def _export_encoder(options: argparse.Namespace) -> str:
    written = export_encoder(
        options.run, options.format, options.output, checkpoint=options.checkpoint, licence=options.licence
    )
    return _number_written(written, options.output)


def _number_written(files: list[Path], directory: Path) -> str:
    return f"wrote {len(files)} files to {directory}"


def _export_rows(options: argparse.Namespace) -> str:
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
        if stored.unit != "image" or read_config(options.run).get("dataset") not in DECODED:
            return text
        try:
            number = write_paths(options.run, stored, rows, options.output / "images.csv", options.data_dir)
        except (ValueError, OSError) as error:
            return f"{text}; without images.csv, as the images' paths are unknown: {error}"
        return f"{text}, and {number:,} paths to {options.output / 'images.csv'}"
