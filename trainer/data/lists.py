"""Reads lists of images: text with a path a line, CSV with or without a header, JSON lines."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.config import SourceOptions
from trainer.data.label_texts import label_text
from trainer.data.left_out import LeftOut, Reason, is_image
from trainer.data.listing import image_hash
from trainer.data.tables import IN_TABLE, columns_of, kind_of, num_rows, values_of
from trainer.data.tree import Folder

_IMAGE_COLUMNS = ("image", "path", "file", "filename", "file_name", "filepath", "image_path", "img", "image_file")
_LABEL_COLUMNS = ("label", "class", "category", "target", "labels", "class_name", "label_name", "species")
_PROBED = 100
"""Paths of a list of which one must exist."""


class _Line(NamedTuple):
    """An image of a list, with the number of its line."""

    number: int
    path: str
    label: str | None
    """Empty without one; None if the line has no place for one."""


def read_list(source: Path, options: SourceOptions, left_out: LeftOut) -> tuple[Folder, str, list[str]]:
    """The images of a list in its order, each path once; what kind of list it is, and lines for people.

    Raises:
        ValueError: a line that cannot be read, or no path that exists.
    """
    kind, lines, notes = _lines(source, options)
    folder, known = Folder("", left_out), set[int]()
    labelled = any(line.label for line in lines)
    for line in lines:
        if labelled and line.label is None:
            raise ValueError(
                f"{source}, line {line.number}: no label: give all images a label, or none; an image without one has "
                "the label -1"
            )
        if not line.path:
            left_out.add(Reason.NO_PATH, f"{source.name}, line {line.number}")
            continue
        path = _plain_path(line.path, source.parent)
        if (key := image_hash(source.parent / path, "")) in known:
            left_out.add(Reason.REPEATED, path)
            continue
        known.add(key)
        folder.add(path, label=" ".join((line.label or "").split()))
    some = [_plain_path(line.path, source.parent) for line in lines[:_PROBED] if line.path]
    if some and not any((source.parent / path).exists() for path in some):
        raise ValueError(
            f"{source}: none of its first {len(some)} paths exists, first {some[0]}: paths are relative to the list's "
            "folder; the list may be text, CSV (--image-column) or JSON lines"
        )
    return folder, kind, notes


def add_table(folder: Folder, path: Path, shown: str, options: SourceOptions) -> list[str]:
    """Adds the images of a table, or those that its paths name; returns lines for people.

    Raises:
        ValueError: a table that cannot be read, or has no column of images.
    """
    names = columns_of(path)
    image = _column(path, names, options.image_column, _IMAGE_COLUMNS, "--image-column")
    label = _column(path, names, options.label_column, _LABEL_COLUMNS, "--label-column")
    if image is None:
        raise ValueError(f"{path} has the columns {', '.join(names)}: name that of the images by --image-column")
    in_table = kind_of(path, image) != "paths"
    values: Iterable[Any] = range(num_rows(path)) if in_table else values_of(path, image)
    for value, text in zip(values, values_of(path, label) if label else itertools.repeat(None), strict=False):
        own = label_text(text, str(path))
        if in_table:
            folder.add(shown, f"{image}[{value}]", offset=value, length=IN_TABLE, label=own)
        else:
            folder.add(str(Path(shown).parent / str(value)), label=own)
    return [f"images from column {image!r}, " + (f"labels from {label!r}" if label else "no labels (--label-column)")]


def _plain_path(path: str, root: Path) -> str:
    """A path as this system writes it: lists of other systems have backslashes."""
    return path.replace("\\", "/") if "\\" in path and not (root / path).exists() else path


def _lines(source: Path, options: SourceOptions) -> tuple[str, list[_Line], list[str]]:
    """The kind of a list, its lines, and lines for people."""
    with source.open("rb") as file:
        start = file.read(4096)
    if b"\0" in start:
        raise ValueError(
            f"{source} is no list of images: give a folder, a tar, a zip, or a list as text, CSV or JSON lines"
        )
    with source.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
            names, rows = _json_rows(source, file)
            return _of_columns("JSON lines", source, names, rows, options)
        if source.suffix.lower() in (".csv", ".tsv") or options.image_column:
            return _csv_lines(source, file.read(), options)
        return "a list", list(_text_lines(source, file)), []


def _csv_lines(source: Path, text: str, options: SourceOptions) -> tuple[str, list[_Line], list[str]]:
    delimiter = max("\t;,", key=lambda mark: text.partition("\n")[0].count(mark))
    rows = [row for row in enumerate(csv.reader(text.splitlines(), delimiter=delimiter), 1) if any(row[1])]
    if not rows:
        return "CSV", [], []
    first = [name.strip() for name in rows[0][1]]
    has_header = bool(options.image_column) or not any(
        is_image(cell) or (source.parent / cell).is_file() for cell in first if cell
    )
    if not has_header and len(first) == 1:
        return "a list", list(_text_lines(source, text.splitlines())), []
    names = (
        first
        if has_header
        else ["image", "label", *(f"column {number}" for number in range(3, len(first) + 1))][: len(first)]
    )
    body = rows[1:] if has_header else rows
    cells = [(number, dict(itertools.zip_longest(names, row[: len(names)], fillvalue=""))) for number, row in body]
    return _of_columns("CSV", source, names, cells, options)


def _json_rows(source: Path, lines: Iterable[str]) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    rows, names = [], dict[str, None]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError):
            raise ValueError(f"{source}, line {number}: not a JSON object: give one a line (JSON lines)") from None
        rows.append((number, row))
        names |= dict.fromkeys(row)
    return list(names), rows


def _of_columns(
    kind: str, source: Path, names: Sequence[str], rows: list[tuple[int, dict[str, Any]]], options: SourceOptions
) -> tuple[str, list[_Line], list[str]]:
    image = _column(source, names, options.image_column, _IMAGE_COLUMNS, "--image-column")
    if image is None:
        raise ValueError(f"{source} has the columns {', '.join(names)}: name that of the paths by --image-column")
    label = _column(source, names, options.label_column, _LABEL_COLUMNS, "--label-column")
    others = [name for name in names if name not in (image, label)]
    notes = [f"paths from column {image!r}, " + (f"labels from {label!r}" if label else "no labels (--label-column)")]
    if others:
        notes.append(f"columns that are not used: {', '.join(others)}")
    lines = []
    for number, row in rows:
        text = label_text(row.get(label) if label else None, f"{source}, line {number}")
        lines.append(_Line(number, str(row.get(image) or "").strip(), text))
    return kind, lines, notes


def _column(source: Path, names: Sequence[str], given: str | None, usual: Sequence[str], option: str) -> str | None:
    if given is not None and given not in names:
        raise ValueError(f"{option} {given}: {source} has the columns {', '.join(names)}")
    found = {name.lower(): name for name in reversed(names)}
    return given or next((found[name] for name in usual if name in found), None)


def _text_lines(source: Path, lines: Iterable[str]) -> Iterator[_Line]:
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            raise ValueError(f"{source}, line {number}: comments are not supported: remove it, or write ./# for a file")
        if line.strip():
            path, label = _split(line.strip())
            yield _Line(number, path, label)


def _split(line: str) -> tuple[str, str | None]:
    """Path and label of a list's line; None without a label."""
    if line.startswith('"') and (end := line.find('"', 1)) > 0:
        return line[1:end], line[end + 1 :].strip(" \t,") or None
    path, tab, label = line.partition("\t")
    if tab:
        return path.strip(), label.strip()
    path, _, label = line.rpartition(" ")
    is_label = label.removeprefix("-").isdecimal() or (is_image(path.strip()) and not is_image(label))
    return (path.strip(), label) if path and is_label else (line, None)
