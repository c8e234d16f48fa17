"""Files that are there whole and durable, or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` fill a file beside `path`, syncs it and renames it into place.

    Raises:
        OSError: it cannot be written, as when the disk is full.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        sync(partial)
        partial.replace(path)
    except (SafetensorError, OSError) as error:
        raise OSError(f"{path} cannot be written ({error})") from None
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Makes a file's contents, or a directory's entries, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """What sha256sum prints."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_empty(directory: Path, *, but: frozenset[str] = frozenset()) -> None:
    """Raises ValueError where there is anything `but` what is named."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: give a directory")
    if directory.exists() and any(path.name not in but for path in directory.iterdir()):
        raise ValueError(f"{directory} is not empty: give another directory")
