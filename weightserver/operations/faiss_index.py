"""Writes rows as an index of faiss, which other programs search by cosine."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import numpy as np

from weightserver.common.atomic_files import atomic_write, directory_lock
from weightserver.common.installing import install_advice
from weightserver.core.arrays import Float32Array, Int64Array


def require_new_index(path: Path) -> None:
    """Raises ValueError if the file exists, the directory that it is to be in does not, or faiss is not installed."""
    if path.exists():
        raise ValueError(f"{path} exists: give another file")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no directory: make it first, or give another file")
    try:
        import_module("faiss")
    except ImportError:
        raise ValueError(f"--faiss needs faiss: {install_advice('faiss')}") from None


def write_index(path: Path, dim: int, parts: Iterable[tuple[Int64Array, Float32Array]]) -> int:
    """Writes an IndexIDMap2 of an IndexFlatIP to `path`, after `require_new_index`; returns its number of rows.

    It holds each row divided by its norm, so that inner products with unit vectors are cosines, under its number. faiss
    keeps the whole index in memory, 4·D + 8 bytes a row; the parts are added one after another.

    Args:
        parts: row numbers (int64 [n]) and weights (float32 [n, D]).

    Raises:
        OSError: the file cannot be written, or another process writes it.
    """
    import faiss

    def write(partial: Path) -> None:
        try:
            faiss.write_index(index, str(partial))
        except RuntimeError as error:  # faiss's errors have several lines
            raise OSError(f"{path} cannot be written ({str(error).splitlines()[-1]})") from None

    with directory_lock(path.with_name(f".{path.name}.lock")):
        index = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        for rows, weight in parts:
            index.add_with_ids(_unit_rows(weight), rows)
        atomic_write(path, write)
    return int(index.ntotal)


def _unit_rows(weight: Float32Array) -> Float32Array:
    """Rows (float32 [n, D]) divided by their norms, float32; rows of zeros stay."""
    exact = weight.astype(np.float64)  # holds the square of every float32
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    return (exact / np.where(norms > 0, norms, 1)).astype(np.float32)
