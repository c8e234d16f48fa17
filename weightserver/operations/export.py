"""Rows as files that other programs read: safetensors, or NumPy's .npz."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from weightserver.client.client import WeightClient
from weightserver.common.atomic_files import atomic_directory, atomic_write, to_path
from weightserver.core.arrays import Int64Array
from weightserver.core.checkpoints import chosen_checkpoint

_BYTES_PER_FILE = 1 << 30
Columns = dict[str, npt.NDArray[Any]]


def _save_safetensors(columns: Columns, metadata: dict[str, str], path: Path) -> None:
    save_file(columns, path, metadata=metadata)


def _save_npz(columns: Columns, metadata: dict[str, str], path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, metadata=np.array(json.dumps(metadata)), **columns)


FORMATS: dict[str, Callable[[Columns, dict[str, str], Path], None]] = {
    "safetensors": _save_safetensors,
    "npz": _save_npz,
}


def export_rows(
    client: WeightClient,
    directory: Path,
    *,
    rows: range | None = None,
    checkpoint: str | None = None,
    step: int | None = None,
    file_format: str = "safetensors",
    rows_per_file: int | None = None,
    more_columns: Callable[[Int64Array], Columns] | None = None,
) -> list[Path]:
    """Writes `rows` (default all) as they are before update `step`: a file for each `rows_per_file`, by default 1 GiB.
    `directory` holds all of them, or there is none.

    A file holds row int64 [n], weight float32 [n, D], momentum_buffer float32 [n, D], last_step int64 [n], what
    `more_columns` makes of the rows (int64 [n]), and what table they are of. With `checkpoint` they are the rows of a
    retained checkpoint, by default for its step: training may go on meanwhile. Without one the default is the step that
    the table has reached, and nobody may write meanwhile.

    Raises:
        ValueError: rows that do not exist, an unknown format, or a directory that is not empty.
        NoTableError: there is no such checkpoint.
        StepError: a row has seen updates beyond `step`.
        DataLossError, ClusterError: without `checkpoint`, the shards' rows are not of one time.
        OSError: the disk is full, or another process writes there.
    """
    if file_format not in FORMATS:
        raise ValueError(f"format {file_format!r} is unknown: give {' or '.join(FORMATS)}")
    if step is not None and step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    written = []
    with atomic_directory(directory) as partly:
        info = client.describe()
        rows = range(info.spec.num_rows) if rows is None else rows
        if not 0 <= rows.start < rows.stop <= info.spec.num_rows or rows.step != 1:
            raise ValueError(f"rows {rows.start}:{rows.stop} do not exist: the table has rows 0:{info.spec.num_rows}")
        kept = None if checkpoint is None else chosen_checkpoint(checkpoint, client.checkpoints())
        if kept is None:
            client.require_common_state()
        if step is None:
            step = kept.step if kept else info.clock
        rows_per_file = rows_per_file or max(1, _BYTES_PER_FILE // (8 * info.spec.dim + 16))
        of = {"run": info.run, "checkpoint": checkpoint or "", "step": str(step)}
        metadata = {"spec": json.dumps(asdict(info.spec)), **of}
        for first in range(rows.start, rows.stop, rows_per_file):
            ids = np.arange(first, min(first + rows_per_file, rows.stop))
            state = client.fetch_state(ids, step=step, checkpoint=kept or "")
            name = f"rows-{ids[0]:012d}-{ids[-1]:012d}.{file_format}"
            columns = {"row": ids, **vars(state), **(more_columns(ids) if more_columns else {})}
            atomic_write(partly / name, partial(FORMATS[file_format], columns, metadata))
            written.append(directory / name)
    return written


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """What `export` is told of rows and files; the trainer's own export is told the same."""
    parser.add_argument("--output", type=to_path, required=True, help="a new directory")
    parser.add_argument("--rows", type=_range, help="FIRST:END, the rows FIRST to END-1 (default all)")
    parser.add_argument(
        "--checkpoint",
        type=non_empty_name,
        help="name of the checkpoint whose rows to write (default the rows of now)",
    )
    parser.add_argument("--step", type=int, help="for which update (default the checkpoint's, or the newest)")
    parser.add_argument("--format", choices=["safetensors", "npz"], default="safetensors")


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    try:
        rows = range(int(first), int(end))
    except ValueError:
        rows = range(0)
    if not 0 <= rows.start < rows.stop:
        raise argparse.ArgumentTypeError(f"{text!r} is no FIRST:END, as in 0:1000")
    return rows


def non_empty_name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: is a variable not set?")
    return text
