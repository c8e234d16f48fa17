"""Reads lists of images, as text with a path a line, CSV, JSON or JSON lines, and tables, which are lists by rows."""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from xxhash import xxh3_128_digest

from trainer.data.config import SourceOptions
from trainer.data.label_texts import check_text, label_text
from trainer.data.left_out import LeftOut, Reason, is_image, quoted
from trainer.data.tables import IN_TABLE, kept_bytes, mark, open_table, splits_of
from trainer.data.tree import Folder

_IMAGE_COLUMNS = ("image", "path", "file", "filename", "file_name", "filepath", "image_path", "img", "image_file")
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "class_name", "label_name", "species")
_PLACES = re.compile(r"{([^{}]+)}")
_SOUGHT = 1_000
"""Most paths of a list that are looked for before its images are read."""
_Row = tuple[str, dict[str, Any]]
"""The place of a row in a list, for messages, and its values by column."""


class _Line(NamedTuple):
    """An image of a list or table."""

    where: str
    """The line or row."""
    path: str
    label: str | None
    """Empty without one; None if the line has no place for one."""


class _Columns(NamedTuple):
    """The columns of a list or table that are read, and what is said of them."""

    image: str
    """A column, or a pattern of columns: train/{id}.jpg."""
    label: str | None
    in_pattern: list[str]
    """The columns of the pattern; empty for a column."""
    notes: list[str]

    def path(self, row: Mapping[str, Any]) -> str:
        """The path of an image in a row, by column."""
        values = {name: str("" if (value := row.get(name)) is None else value).strip() for name in self.in_pattern}
        if not values:
            return str(row.get(self.image) or "").strip()
        return _PLACES.sub(lambda place: values[place[1]], self.image) if all(values.values()) else ""


def add_list(folder: Folder, source: Path, options: SourceOptions, left_out: LeftOut) -> tuple[str, list[str]]:
    """Adds the images of a list in its order, each path once; returns what kind of list it is, and lines for people.

    Raises:
        ValueError: a line that cannot be read, or no path that exists.
    """
    with source.open("rb") as content:
        start = content.read(4096)
    with source.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        kind, lines, notes = _lines(source, start, file, options)
        lines = _labelled_alike(source, lines)
        return kind, [*notes, *_add_paths(folder, source, source.name, lines, left_out, dict[bytes, str]())]


def add_tables(top: Folder, root: Path, tables: Sequence[str], options: SourceOptions, left_out: LeftOut) -> list[str]:
    """Adds the images of tables, or those that their paths name, to folders of their splits; returns lines for people.

    Args:
        tables: paths relative to `root`.

    Raises:
        ValueError: a table that cannot be read, or has no column of images; tables of several data sets.
    """
    notes, known, groups = [], dict[bytes, str](), list[int]()
    for shown, split in zip(tables, splits_of(tables), strict=True):
        folder, path = top.folder(split) if split else top, root / shown
        offset = mark(path)  # before its rows are read: a table that is rewritten meanwhile is another one
        table = open_table(path)
        columns = _columns(path, table.names, options)
        values = table.values(columns.label) if columns.label else itertools.repeat(None, table.num_rows)
        labels = (label_text(value, f"{path}, row {row}") for row, value in enumerate(values))
        notes += columns.notes
        if columns.in_pattern or table.has_paths(columns.image):
            names = columns.in_pattern or [columns.image]
            rows = zip(*map(table.values, names), strict=True)
            paths = (columns.path(dict(zip(names, row, strict=True))) for row in rows)
            lines = map(_Line, (f"row {row}" for row in itertools.count()), paths, labels)
            notes += _add_paths(folder, path, shown, lines, left_out, known)
        else:
            groups += table.group_bytes
            for row, label in enumerate(labels):
                folder.add(shown, f"{columns.image}[{row}]", offset=offset, length=IN_TABLE, label=label)
    if sum(groups) > kept_bytes():
        notes.append(
            f"Parquet is read by row groups, of {sum(groups) / len(groups) / 2**20:,.0f} MiB here, and more than fit "
            "into an eighth of the memory: many images take the reading of one each; write Arrow files (docs/images.md)"
        )
    return notes


def _add_paths(
    folder: Folder, source: Path, shown: str, lines: Iterable[_Line], left_out: LeftOut, known: dict[bytes, str]
) -> Iterator[str]:
    """Adds images by their paths, which are relative to the list or table, each once; yields a line if some do
    not exist.

    Args:
        shown: the list's own path, relative to the source's folder.
        known: labels by a digest of the path of the images that were added already, and are from now on.

    Raises:
        ValueError: no path exists, or one that no file can have.
    """
    before, step, sought = len(known), 1, list[str]()
    for line in lines:
        path, label = _plain_path(line.path, source.parent), sys.intern(" ".join((line.label or "").split()))
        check_text(path, f"{source}, {line.where}")
        if "\0" in path:
            raise ValueError(f"{source}, {line.where}: {quoted(repr(path))} is no path: remove the zero byte")
        if not path:
            left_out.add(Reason.NO_PATH, f"{shown}, {line.where}")
        elif (key := xxh3_128_digest(os.fsencode(source.parent / path))) in known:
            left_out.add(Reason.REPEATED if known[key] == label else Reason.CONTRADICTED, quoted(path))
        else:
            if (len(known) - before) % step == 0:
                sought.append(path)
                if len(sought) > _SOUGHT:  # of a list of unknown length: every second from now on
                    sought, step = sought[::2], 2 * step
            known[key] = label
            folder.add(os.path.join(os.path.dirname(shown), path), label=label)
    added = len(known) - before
    missing = [path for path in sought if not os.path.exists(source.parent / path)]
    first = f"first {quoted(missing[0])}" if missing else ""
    for form in ("NFC", "NFD"):  # macOS has decomposed accents
        if any(os.path.exists(source.parent / unicodedata.normalize(form, path)) for path in missing):
            first += f" (files have their accents in the form {form}: convert the list)"
    if missing and len(missing) == len(sought):
        raise ValueError(
            f"{source}: none of the {len(sought):,} paths that were looked for exists, {first}: paths are relative to "
            "the list's folder; --image-column 'train/{id}.jpg' makes them of a column"
        )
    if missing:
        number = f"{len(missing):,} of {added:,}"
        if len(sought) < added:
            number = f"about {len(missing) * added // len(sought):,} of {added:,}"
        yield f"{number} images do not exist, {first}: they count as broken (--max-broken)"


def _plain_path(path: str, root: Path) -> str:
    """A path as this system writes it: lists of other systems have backslashes."""
    return path.replace("\\", "/") if "\\" in path and not os.path.exists(root / path) else path


def _labelled_alike(source: Path, lines: Iterable[_Line]) -> Iterator[_Line]:
    """The lines; raises ValueError once some have a label, and others no place for one."""
    labelled, without = False, ""
    for line in lines:
        labelled = labelled or bool(line.label)
        without = without or ("" if line.label is not None else line.where)
        if labelled and without:
            raise ValueError(
                f"{source}, {without}: no label: give all images a label, or none; an image without one has the "
                "label -1"
            )
        yield line


def _lines(source: Path, start: bytes, file: TextIO, options: SourceOptions) -> tuple[str, Iterator[_Line], list[str]]:
    """The kind of a list that begins with `start`, its lines, which are read one by one, and lines for people."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{source} is text in UTF-16: save it in UTF-8")
    if b"\0" in start:
        raise ValueError(
            f"{source} is no list of images: give a folder, a tar, a zip, or a list as text, CSV, JSON or JSON lines"
        )
    if found := re.match(rb"(?:\xef\xbb\xbf)?\s*(\[\s*)?{", start):
        if found[1]:
            array = _json_array(source, file)
            names, rows = dict.fromkeys(name for _, row in array for name in row), iter(array)
        else:
            names = dict.fromkeys(name for _, row in _json_lines(source, file) for name in row)
            file.seek(0)
            rows = _json_lines(source, file)
        return "JSON" if found[1] else "JSON lines", *_of_columns(source, [*names], rows, options)
    if source.suffix.lower() in (".csv", ".tsv") or options.image_column:
        return "CSV", *_of_columns(source, *_csv_rows(source, file, options), options)
    return "a list", _text_lines(source, file), []


def _csv_rows(source: Path, file: TextIO, options: SourceOptions) -> tuple[list[str], Iterator[_Row]]:
    """The names of the columns of a CSV, and its rows."""
    start = [file.readline()]
    while start[-1].isspace():
        start.append(file.readline())
    delimiter = max("\t;,", key=start[-1].count)
    rows = _csv_cells(source, itertools.chain(start, file), delimiter)
    first = next(rows, None)
    names = [name.strip() for name in first[1]] if first else []
    has_header = bool(options.image_column) or not any(
        is_image(cell) or os.path.isfile(source.parent / cell) for cell in names if cell
    )
    if first and not has_header:
        names = ["image", "label", *(f"column {number}" for number in range(3, len(names) + 1))][: len(names)]
        rows = itertools.chain([first], rows)

    def by_column() -> Iterator[_Row]:
        for number, row in rows:
            if any(row[len(names) :]):
                raise ValueError(
                    f"{source}, line {number}: {len(row)} cells for {len(names)} columns: put a cell with "
                    f"{delimiter!r} into quotation marks"
                )
            yield f"line {number}", dict(itertools.zip_longest(names, row[: len(names)], fillvalue=""))

    return names, by_column()


def _csv_cells(source: Path, lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The number of the line with which each row begins that is not empty, and its cells."""
    reader, start = csv.reader(lines, delimiter=delimiter, strict=True), 1
    try:
        for row in reader:
            if row:
                yield start, row
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{source}, line {start}: not CSV ({error}): put a cell with quotation marks into quotation marks, and "
            "double its own; a cell has up to 131,072 characters; JSON lines have no such rules"
        ) from None


def _json_array(source: Path, file: TextIO) -> list[_Row]:
    try:
        return [(f"object {number}", dict(row)) for number, row in enumerate(json.load(file), 1)]
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{source}: not a JSON array of objects: give an object for each image") from None


def _json_lines(source: Path, lines: Iterable[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{source}, line {number}: not a JSON object: give one a line (JSON lines)") from None
        yield f"line {number}", row


def _of_columns(
    source: Path, names: Sequence[str], rows: Iterable[_Row], options: SourceOptions
) -> tuple[Iterator[_Line], list[str]]:
    columns = _columns(source, names, options)

    def line(where: str, row: dict[str, Any]) -> _Line:
        text = label_text(row.get(columns.label) if columns.label else None, f"{source}, {where}")
        return _Line(where, columns.path(row), text)

    return itertools.starmap(line, rows), columns.notes


def _columns(source: Path, names: Sequence[str], options: SourceOptions) -> _Columns:
    given = options.image_column
    in_pattern = _PLACES.findall(given) if given and given not in names else []
    for name in in_pattern:
        _column(source, names, name, (), "--image-column")
    image = given if in_pattern else _column(source, names, given, _IMAGE_COLUMNS, "--image-column")
    if image is None:
        raise ValueError(
            f"{source} has the columns {quoted(', '.join(names))}: name that of the images by --image-column, or "
            "make their paths of it: 'train/{id}.jpg'"
        )
    label = _column(source, names, options.label_column, _LABEL_COLUMNS, "--label-column")
    others = [name for name in names if name not in (image, label, *in_pattern)]
    notes = [f"images from column {image!r}, " + (f"labels from {label!r}" if label else "no labels (--label-column)")]
    if others:
        notes.append(f"columns that are not used: {quoted(', '.join(others))}")
    return _Columns(image, label, in_pattern, notes)


def _column(source: Path, names: Sequence[str], given: str | None, usual: Sequence[str], option: str) -> str | None:
    if given is not None and given not in names:
        raise ValueError(f"{option} {given}: {source} has the columns {quoted(', '.join(names))}")
    found = {name.lower(): name for name in reversed(names)}
    column = given or next((found[name] for name in usual if name in found), None)
    if column and names.count(column) > 1:
        raise ValueError(f"{source} has {names.count(column)} columns {column!r}: rename all but one of them")
    return column


def _text_lines(source: Path, lines: Iterable[str]) -> Iterator[_Line]:
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            raise ValueError(f"{source}, line {number}: comments are not supported: remove it, or write ./# for a file")
        if line.strip():
            path, label = _split(line.rstrip("\r\n"), source.parent)
            yield _Line(f"line {number}", path, label)


def _split(line: str, root: Path) -> tuple[str, str | None]:
    """Path and label of a list's line; None without a label, which follows a tab, or a blank after an image's name."""
    path, tab, label = line.partition("\t")
    if tab:
        return path.strip(' "'), label.strip(' "')
    line = line.strip()
    if line.startswith('"') and (end := line.find('"', 1)) > 0:
        return line[1:end], line[end + 1 :].strip(" ,") or None
    blanks = [place for place, character in enumerate(line) if character == " "]
    after_name = next((place for place in reversed(blanks) if is_image(line[:place].rstrip())), None)
    path, _, label = line.rpartition(" ")
    path = path.strip() if label.removeprefix("-").isdecimal() else ""
    if not is_image(line) and after_name is not None:
        name, rest = line[:after_name].rstrip(), line[after_name:].strip(' "')
        in_folder = "/" in rest and any(os.path.isfile(root / one) for one in (path, line))  # of such a name
        if not in_folder:
            return name, rest
    return (path, label) if path else (line, None)
