"""Writes which image each exported row belongs to, by the path of the image's file."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from trainer.data.decoded_images import DecodedImages
from trainer.run.checkpoint_file import newest_images
from trainer.run.resume import run_settings
from trainer.run.stored_rows import StoredRows
from trainer.run_dataset import dataset_of
from weightserver.common.atomic_files import atomic_write

_ROWS_TOGETHER = 1 << 16


def write_paths(run: Path, stored: StoredRows, rows: range, path: Path, data_dir: Path | None = None) -> int:
    """Writes a CSV with row, image and path of each of `rows`; returns their number. The run's images are in files.

    Raises:
        ValueError: the images are not those of the run any more.
        OSError: the images or the file are out of reach.
    """
    images = _images_of(run, stored, data_dir)

    def write(partial: Path) -> None:
        with partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            lines = csv.writer(file)
            lines.writerow(["row", "image", "path"])
            for first in range(rows.start, rows.stop, _ROWS_TOGETHER):
                some = np.arange(first, min(rows.stop, first + _ROWS_TOGETHER))
                ids = stored.order.images(some)
                lines.writerows(zip(some.tolist(), ids.tolist(), images.paths(ids), strict=True))

    atomic_write(path, write)
    return len(rows)


def _images_of(run: Path, stored: StoredRows, data_dir: Path | None) -> DecodedImages:
    config, known = run_settings(run), newest_images(run / "checkpoints")
    dataset = dataset_of(config, data_dir).first(stored.num_images)
    is_known = known is None or known.digests in ((), dataset.digests)
    if len(dataset.train_images) != stored.num_images or not is_known:
        raise ValueError(
            f"{data_dir or config.data.data_dir} does not hold the images of the run any more: give --data-dir"
        )
    assert isinstance(dataset.train_images, DecodedImages)
    return dataset.train_images
