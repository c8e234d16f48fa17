"""Reads tables of images by pyarrow: Parquet, Arrow and Feather files, and data sets of Hugging Face in such files.

A table has a column of paths, or of images: bytes, or structs of bytes and path, as the library `datasets` writes them.
An image in a table is an entry of a listing with the table's path and `mark`, and COLUMN[ROW] as member.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import itertools
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from xxhash import xxh3_64

from trainer.data.archives import read_single, version
from trainer.data.config import split_of
from weightserver.common.installing import install_advice
from weightserver.common.processes import usable_memory

IN_TABLE = -2
"""Length of an entry whose image is in a table; its offset is the table's `mark`."""
_PART = re.compile(r"[-_.]?\d{5}-of-\d{5}$")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_KEPT_SHARE = 8
"""Row groups that were read are kept in an eighth of the memory, of all ranks together: a row group may be a file."""


def splits_of(tables: Sequence[str]) -> list[str]:
    """The split of each table by its name or its folder's, as the hub has them; empty if there are not several.

    Raises:
        ValueError: several data sets, which have splits of the same names.
    """
    splits, homes = [], dict[str, None]()
    for table in map(PurePath, tables):
        above = table.parent
        split = next((name for name in (_PART.sub("", table.stem), above.name) if split_of(name)), "")
        homes[str(above.parent if split and split == above.name else above)] = None
        splits.append(split)
    if len(set(splits)) < 2:
        return [""] * len(tables)
    if len(homes) > 1:
        raise ValueError(f"the tables in {', '.join(homes)} are data sets with splits of their own: give one folder")
    return splits


def open_table(path: Path) -> Table:
    """A table, which is kept open. Raises ValueError if it cannot be read, or pyarrow is missing."""
    return _opened(*version(path))


def mark(path: Path) -> int:
    """A checksum of a table's length, its end and samples of its content: rows, which are known by number alone, have
    other numbers where it differs."""
    return _mark(*version(path))


def read_cell(path: Path, member: str, listed: int) -> bytes:
    """The encoded image of COLUMN[ROW] in a table that was listed with a `mark`.

    Raises:
        OSError: there is none.
        ValueError: the table was rewritten since it was listed.
    """
    table = open_table(path)  # first: one that is replaced before it is opened has another mark
    if mark(path) != listed:
        raise ValueError(
            f"{path} is another table than was listed: put the earlier one back, or list and pack the images again"
        )
    column, _, number = member.removesuffix("]").rpartition("[")
    row = int(number)
    part = bisect.bisect_right(table.starts, row) - 1
    value = table.part(part, column)[row - table.starts[part]].as_py()
    content, file = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if content is None and file:
        return read_single(path.parent / str(file))
    if not isinstance(content, bytes):
        raise OSError("no image in this row")
    return content


class Table:
    """A Parquet file by its row groups, or a stream or file of Arrow by its batches.

    Attributes:
        names: of its columns.
        group_bytes: size of each row group of Parquet in memory; empty for Arrow, whose images are read one by one.
    """

    def __init__(self, path: str, file_version: tuple[int, ...]) -> None:
        try:
            arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise ValueError(f"{path} is a table of images, which needs pyarrow: {install_advice('parquet')}") from None
        self._path, self._file_version, self._arrow, self._lock = path, file_version, arrow, threading.Lock()
        self._readers, self.group_bytes = dict[str, Any](), list[int]()
        self._is_arrow = not path.lower().endswith(".parquet")
        try:
            if self._is_arrow:
                self._content = content = arrow.memory_map(path)
                is_file = content.read(6) == b"ARROW1"  # Feather; `datasets` writes streams
                content.seek(0)
                reader = arrow.ipc.open_file(content) if is_file else arrow.ipc.open_stream(content)
                self.schema = reader.schema
                self._stream: list[Any] | None = None if is_file else list(reader)
                counts = list(map(len, self._stream or ()))
                for column in self.schema.names[-1:] if is_file else ():  # batches may be compressed: one at a time
                    batches = map(self._reader(column).get_batch, range(reader.num_record_batches))
                    counts = list(map(len, batches))
            else:
                self._file = parquet.ParquetFile(path, pre_buffer=False)  # it would keep what was read
                self.schema = self._file.schema_arrow
                groups = range(self._file.num_row_groups)
                counts = [self._file.metadata.row_group(group).num_rows for group in groups]
                self.group_bytes = [self._file.metadata.row_group(group).total_byte_size for group in groups]
        except (OSError, arrow.ArrowException) as error:
            raise ValueError(f"{path} is not a table that pyarrow can read ({error}): fetch it again") from None
        self.names: list[str] = self.schema.names
        self.starts = [0, *itertools.accumulate(counts)]
        self.num_rows = self.starts[-1]

    def has_paths(self, column: str) -> bool:
        """Whether a column has paths; otherwise it has images, as bytes or as structs of bytes and path."""
        kind = str(self.schema.field(column).type)
        return not kind.startswith("struct") and "binary" not in kind

    def values(self, column: str) -> Iterator[Any]:
        """The values of a column; of one with names of classes, as `datasets` writes them, the names."""
        names = _class_names(self.schema.metadata or {}, column)
        for part in range(len(self.starts) - 1):
            for value in self.part(part, column).to_pylist():
                yield names[value] if names and isinstance(value, int) and 0 <= value < len(names) else value

    def _reader(self, column: str) -> Any:
        """Reads the batches of a file of Arrow, one column of them."""
        if column not in self._readers:
            options = self._arrow.ipc.IpcReadOptions(included_fields=[self.schema.names.index(column)])
            self._readers[column] = self._arrow.ipc.open_file(self._content, options=options)
        return self._readers[column]

    def part(self, part: int, column: str) -> Any:
        """The values of a column in a row group or batch."""
        if self._is_arrow and self._stream is not None:
            return self._stream[part].column(column)
        try:
            with self._lock:  # two threads that read the same file could wait for each other for ever
                key = (self._path, self._file_version, part, column)
                if (found := _kept.get(key)) is None:
                    if self._is_arrow:
                        found = self._reader(column).get_batch(part).column(0)
                    else:
                        found = self._file.read_row_group(part, [column], use_threads=False).column(0)
                    _kept.add(key, found)
                return found
        except (OSError, self._arrow.ArrowException) as error:
            raise OSError(f"{self._path} is damaged ({' '.join(str(error).split())}): fetch it again") from None


_Key = tuple[str, tuple[int, ...], int, str]
"""A file and its version, the row group, and the column."""


class _Kept:
    """Columns of row groups, of all tables together, that were used last. Thread-safe."""

    def __init__(self) -> None:
        self._columns = OrderedDict[_Key, Any]()
        self._bytes, self._lock = 0, threading.Lock()

    def get(self, key: _Key) -> Any:
        with self._lock:
            if key in self._columns:
                self._columns.move_to_end(key)
            return self._columns.get(key)

    def add(self, key: _Key, column: Any) -> None:
        most = kept_bytes()
        with self._lock:
            if key in self._columns:
                return
            self._columns[key] = column
            self._bytes += column.nbytes
            while self._bytes > most and len(self._columns) > 1:
                self._bytes -= self._columns.popitem(last=False)[1].nbytes


_kept = _Kept()


def kept_bytes() -> int:
    """Most bytes of row groups that this rank keeps."""
    return usable_memory() // _KEPT_SHARE // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@functools.cache
def _mark(path: str, size: int, _: int) -> int:
    digest = xxh3_64(str(size).encode())
    with open(path, "rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.intdigest()


@functools.lru_cache(64)
def _opened(path: str, *file_version: int) -> Table:
    """A table, by its file's `version`."""
    return Table(path, file_version)


def _class_names(metadata: Mapping[bytes, bytes], column: str) -> list[str]:
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[column]["names"]]
    except (KeyError, ValueError, TypeError, RecursionError):
        return []
