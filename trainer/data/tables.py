"""Reads tables of images: Parquet files, and data sets of Hugging Face in Parquet or Arrow files, by pyarrow.

A table has a column of paths, or of images: bytes, or structs of bytes and path, as the library `datasets` writes them.
An image in a table is an entry of a listing with the table's path, its row, and COLUMN[ROW] as member.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.data.config import SPLITS
from trainer.data.left_out import TABLE_SUFFIXES
from weightserver.common.installing import install_advice

IN_TABLE = -2
"""Length of an entry whose image is in a table; its offset is the row."""
_PART = re.compile(r"[-_.]?\d{5}-of-\d{5}$")


def tables_in(source: Path) -> list[tuple[str, Path]]:
    """The tables of a source, each with the name of its split, or none: a file, or files in a folder."""
    if not source.is_dir():
        return [("", source)] if source.suffix in TABLE_SUFFIXES else []
    found = [path for path in sorted(source.rglob("*.*")) if path.suffix in TABLE_SUFFIXES]
    found = [path for path in found if not path.name.startswith(("cache-", "."))]
    splits = [
        next((name for name in (_PART.sub("", path.stem), path.parent.name) if name in SPLITS), "") for path in found
    ]
    return list(zip(splits if len(set(splits)) > 1 else [""] * len(found), found, strict=True))


def columns_of(path: Path) -> list[str]:
    """Names of a table's columns. Raises ValueError if it cannot be read, or pyarrow is missing."""
    return list(_opened(str(path)).names)


def kind_of(path: Path, column: str) -> str:
    """What a column of images has: bytes, bytes in structs, or paths."""
    kind = str(_opened(str(path)).schema.field(column).type)
    return "struct" if kind.startswith("struct") else "bytes" if "binary" in kind else "paths"


def num_rows(path: Path) -> int:
    return _opened(str(path)).starts[-1]


def values_of(path: Path, column: str) -> Iterator[Any]:
    """The values of a column; of one with names of classes, as `datasets` writes them, the names."""
    table = _opened(str(path))
    names = _class_names(table.schema.metadata or {}, column)
    for part in range(len(table.starts) - 1):
        for value in table.part(part, column).to_pylist():
            yield names[value] if names and isinstance(value, int) and 0 <= value < len(names) else value


def read_cell(path: Path, member: str, row: int) -> bytes:
    """The encoded image in a row, of the column that the member's name begins with. Raises OSError if there is none."""
    column = member.rpartition("[")[0]
    table = _opened(str(path))
    part = bisect.bisect_right(table.starts, row) - 1
    value = table.part(part, column)[row - table.starts[part]].as_py()
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise OSError("no image in this row")
    return content


class _Table:
    """A Parquet file by its row groups, or a stream of Arrow by its batches."""

    def __init__(self, path: str) -> None:
        try:
            arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise ValueError(f"{path} is a table of images, which needs pyarrow: {install_advice('parquet')}") from None
        try:
            if path.endswith(".arrow"):
                self._batches: list[Any] = list(arrow.ipc.open_stream(arrow.memory_map(path)))
                self.schema = self._batches[0].schema if self._batches else arrow.schema([])
                counts = [len(batch) for batch in self._batches]
            else:
                self._file = parquet.ParquetFile(path)
                self.schema = self._file.schema_arrow
                groups = range(self._file.num_row_groups)
                counts = [self._file.metadata.row_group(group).num_rows for group in groups]
        except (OSError, arrow.ArrowException) as error:
            raise ValueError(f"{path} is not a table that pyarrow can read ({error}): fetch it again") from None
        self._is_stream = path.endswith(".arrow")
        self.names = self.schema.names
        self.starts = [0, *itertools.accumulate(counts)]
        self.part = functools.lru_cache(4)(self._part)

    def _part(self, part: int, column: str) -> Any:
        if self._is_stream:
            return self._batches[part].column(column)
        return self._file.read_row_group(part, [column]).column(0)


_opened = functools.lru_cache(64)(_Table)


def _class_names(metadata: Mapping[bytes, bytes], column: str) -> list[str]:
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[column]["names"]]
    except (KeyError, ValueError, TypeError):
        return []
