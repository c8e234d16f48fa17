"""Writes rows to files that other programs read: safetensors, NumPy's .npz, or an index of faiss."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from weightserver.client.client import WeightClient
from weightserver.client.results import TableInfo
from weightserver.common.atomic_files import atomic_directory, atomic_write, to_path
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.checkpoints import Checkpoint, chosen_checkpoint
from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.operations.faiss_index import require_new_index, write_index

_BYTES_PER_FILE = 1 << 30
_BYTES_PER_PART = 64 << 20
"""Weights that are added to an index at a time."""
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
    """Writes `rows` (default all) in their state before update `step` to new files in `directory`; returns their paths.

    Each file holds up to `rows_per_file` rows, by default 1 GiB of them, as row int64 [n], weight float32 [n, D],
    momentum_buffer float32 [n, D], last_step int64 [n] and the columns that `more_columns` returns for the rows
    (int64 [n]); its metadata describes the table. `directory` appears only once all files are complete.

    With `checkpoint` the rows are those of a retained checkpoint, by default at its step, and training may continue.
    Without one `step` defaults to the newest step of the table, and nothing may write to the table meanwhile.

    Raises:
        ValueError: the rows do not exist, the format is unknown, or the directory is not empty.
        NoTableError: the checkpoint does not exist.
        StepError: a row already holds updates beyond `step`.
        DataLossError, ClusterError: without `checkpoint`, the shards hold rows of different times.
        OSError: the disk is full, or another process writes to the directory.
    """
    if file_format not in FORMATS:
        raise ValueError(f"format {file_format!r} is unknown: give {' or '.join(FORMATS)}")
    if step is not None and step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    written = []
    with atomic_directory(directory) as partial_directory:
        selection = _select(client, rows, checkpoint, step)
        rows_per_file = rows_per_file or max(1, _BYTES_PER_FILE // (8 * selection.info.spec.dim + 16))
        for first in range(selection.rows.start, selection.rows.stop, rows_per_file):
            ids = np.arange(first, min(first + rows_per_file, selection.rows.stop))
            state = client.fetch_state(ids, step=selection.step, checkpoint=selection.checkpoint or "")
            columns = {"row": ids, **vars(state), **(more_columns(ids) if more_columns else {})}
            name = f"rows-{ids[0]:012d}-{ids[-1]:012d}.{file_format}"
            atomic_write(partial_directory / name, partial(FORMATS[file_format], columns, selection.metadata))
            written.append(directory / name)
    return written


def export_index(
    client: WeightClient,
    path: Path,
    *,
    rows: range | None = None,
    checkpoint: str | None = None,
    step: int | None = None,
) -> int:
    """Writes `rows` as an index of faiss to a new file; returns its number of rows. See `write_index`.

    The arguments and the state of the rows are those of `export_rows`.

    Raises:
        ValueError, NoTableError, StepError, DataLossError, ClusterError, OSError: as `export_rows`.
        ValueError: see `require_new_index`.
    """
    require_new_index(path)
    selection = _select(client, rows, checkpoint, step)
    dim = selection.info.spec.dim

    def parts() -> Iterator[tuple[Int64Array, Float32Array]]:
        rows_per_part = max(1, _BYTES_PER_PART // (4 * dim))
        for first in range(selection.rows.start, selection.rows.stop, rows_per_part):
            ids = np.arange(first, min(first + rows_per_part, selection.rows.stop))
            yield ids, client.fetch(ids, step=selection.step, checkpoint=selection.checkpoint or "")

    return write_index(path, dim, parts())


@dataclass(frozen=True)
class _Selection:
    """The rows to export and the state they are in."""

    info: TableInfo
    rows: range
    checkpoint: Checkpoint | None
    step: int

    @property
    def metadata(self) -> dict[str, str]:
        return {
            "spec": json.dumps(asdict(self.info.spec)),
            "run": self.info.run,
            "checkpoint": self.checkpoint.name if self.checkpoint else "",
            "step": str(self.step),
        }


def _select(client: WeightClient, rows: range | None, checkpoint: str | None, step: int | None) -> _Selection:
    """Resolves the defaults of `export_rows`. Raises as it does."""
    info = client.describe()
    rows = range(info.spec.num_rows) if rows is None else rows
    if not 0 <= rows.start < rows.stop <= info.spec.num_rows or rows.step != 1:
        raise ValueError(f"rows {rows.start}:{rows.stop} do not exist: the table has rows 0:{info.spec.num_rows}")
    if checkpoint is None:
        client.require_common_state()
        return _Selection(info, rows, None, info.clock if step is None else step)
    kept = chosen_checkpoint(checkpoint, client.checkpoints())
    return _Selection(info, rows, kept, kept.step if step is None else step)


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    add_export_options(parser, output_required=False)
    parser.add_argument("--faiss", type=to_path, metavar="FILE", help="a new file, for an index of faiss (cosine)")


def add_export_options(parser: argparse.ArgumentParser, *, output_required: bool = True) -> None:
    """Adds the options of rows and files, which the trainer's own export shares."""
    parser.add_argument("--output", type=to_path, required=output_required, help="a new directory")
    parser.add_argument("--rows", type=_range, help="FIRST:END, the rows FIRST to END-1 (default all)")
    parser.add_argument(
        "--checkpoint", type=non_empty_name, help="export the rows of this checkpoint (default the current rows)"
    )
    parser.add_argument(
        "--step", type=int, help="state before this update (default the checkpoint's step, or the newest)"
    )
    parser.add_argument(
        "--format", choices=["safetensors", "npz"], default="safetensors", help="file format (default safetensors)"
    )


def run(arguments: argparse.Namespace) -> None:
    if arguments.output is None and arguments.faiss is None:
        raise ValueError("nothing to write: give --output DIRECTORY, --faiss FILE, or both")
    if arguments.faiss is not None:
        require_new_index(arguments.faiss)  # before hours of other rows
    state: dict[str, Any] = {"rows": arguments.rows, "checkpoint": arguments.checkpoint, "step": arguments.step}
    with connect(arguments) as client:
        if arguments.output is not None:
            written = export_rows(client, arguments.output, file_format=arguments.format, **state)
            print(f"wrote {len(written)} files to {arguments.output}")
        if arguments.faiss is not None:
            num_rows = export_index(client, arguments.faiss, **state)
            print(f"wrote {num_rows} rows to {arguments.faiss}")


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    try:
        rows = range(int(first), int(end))
    except ValueError:
        rows = range(0)
    if not 0 <= rows.start < rows.stop:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FIRST:END, such as 0:1000")
    return rows
