"""Archives and tables that tests write."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            add_to(tar, name, content)
    return path


def add_to(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def write_zip(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def write_table(path: Path, **columns: Sequence[Any]) -> Path:
    """Writes Parquet or, by the suffix, a file of Arrow; skips the test without pyarrow."""
    arrow, parquet = (pytest.importorskip(one, reason="no pyarrow") for one in ("pyarrow", "pyarrow.parquet"))
    path.parent.mkdir(parents=True, exist_ok=True)
    table = arrow.table(columns)
    if path.suffix == ".arrow":
        with arrow.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    else:
        parquet.write_table(table, path)
    return path
