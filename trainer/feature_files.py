"""Files of features with the paths of their images: Parquet, or .npz of NumPy."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.data.parts import Part
from weightserver.common.atomic_files import atomic_write, directory_lock
from weightserver.common.installing import install_advice
from weightserver.core.arrays import Float32Array

_DIGEST = b"pic-embed"
"""Key of a Parquet file's metadata."""


class Batch(NamedTuple):
    """One or more images and their features."""

    paths: list[str]
    vectors: Float32Array
    """float32 [n, d]."""
    split: str
    """The split of the images, which is a column of the file; empty if they are of none."""


def check_output(path: Path) -> None:
    """Raises ValueError unless `write_features` can write to `path`, before anything is computed."""
    if path.suffix not in _WRITERS:
        raise ValueError(f"{path} has no known suffix: give a file of {', '.join(_WRITERS)}")
    if path.exists():
        raise ValueError(f"{path} exists: give another --output")
    if path.suffix == ".parquet":
        _pyarrow()


def part_output(folder: Path, part: Part, digest: str) -> Path:
    """The file of a part in a folder of parts, which is made if it is missing.

    Raises:
        ValueError: the folder has other files, or parts of another number or `digest`; no pyarrow.
    """
    if folder.suffix in _WRITERS or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} is no folder, into which parts are written: give another --output")
    _, parquet = _pyarrow()
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("[!.]*")):
        known = re.fullmatch(rf"part-\d+-of-{part.of:05d}\.parquet(\.partial)?", path.name)
        metadata = parquet.read_schema(path).metadata or {} if known and not known[1] else {_DIGEST: digest.encode()}
        if not known or metadata.get(_DIGEST) != digest.encode():
            raise ValueError(
                f"{path} is none of these {part.of} parts, or of another encoder or other images: give another --output"
            )
    return folder / f"part-{part.number:05d}-of-{part.of:05d}.parquet"


def vectors_in_parts(folder: Path) -> int:
    """The number of vectors in all parts of a folder."""
    _, parquet = _pyarrow()
    return sum(parquet.read_metadata(path).num_rows for path in folder.glob("part-*.parquet"))


def write_features(path: Path, batches: Iterable[Batch], digest: str = "") -> tuple[int, int]:
    """Writes batches to a new file, which appears when it is complete; returns the number of vectors and their length.

    Args:
        digest: what a Parquet file is to say of its contents, for `part_output`.

    Raises:
        ValueError: a file that exists or of another suffix, Parquet without pyarrow, or no image at all.
        OSError: the file cannot be written, or another process writes it.
    """
    number = dim = 0

    def counted() -> Iterator[Batch]:
        nonlocal number, dim
        for batch in batches:
            number, dim = number + len(batch.paths), batch.vectors.shape[1]
            yield batch
        if not number:
            of_part, remedy = (f" of {path.stem}", ", or give fewer parts") if digest else ("", "")
            raise ValueError(f"none of the images{of_part} can be read: repair them{remedy}")

    with directory_lock(path.with_name(f".{path.name}.lock")):
        check_output(path)
        atomic_write(path, lambda partial: _WRITERS[path.suffix](partial, counted(), digest))
    return number, dim


def _write_parquet(path: Path, batches: Iterator[Batch], digest: str) -> None:
    arrow, parquet = _pyarrow()
    writer: Any = None
    try:
        for batch in batches:
            vectors = arrow.FixedSizeListArray.from_arrays(batch.vectors.reshape(-1), batch.vectors.shape[1])
            split = {"split": arrow.array([batch.split] * len(batch.paths), arrow.string())} if batch.split else {}
            paths = [path.encode("utf-8", "backslashreplace").decode() for path in batch.paths]
            table = arrow.table({"path": arrow.array(paths, arrow.string()), **split, "vector": vectors})
            table = table.replace_schema_metadata({_DIGEST: digest} if digest else None)
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _write_npz(path: Path, batches: Iterator[Batch], _: str) -> None:
    paths, splits = list[str](), list[str]()
    vectors: list[Float32Array] = []
    for batch in batches:
        paths += batch.paths
        splits += [batch.split] * len(batch.paths)
        vectors.append(batch.vectors)
    arrays: dict[str, Any] = {"path": np.array(paths), "vector": np.concatenate(vectors)}
    if any(splits):
        arrays["split"] = np.array(splits)
    with path.open("wb") as file:
        np.savez(file, **arrays)


def _pyarrow() -> tuple[Any, Any]:
    """pyarrow and its Parquet module. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError(
            f"a Parquet file needs pyarrow: {install_advice('parquet')}, or give --output NAME.npz without --part"
        ) from None


_WRITERS: dict[str, Callable[[Path, Iterator[Batch], str], None]] = {
    ".parquet": _write_parquet,
    ".npz": _write_npz,
}
