"""The tombstone that `compact` leaves in the directory that it copied, so that the old data is not served by mistake.

It is a symbolic link to the copy: made in one step, also on a full disk.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from weightserver.common.atomic_files import sync
from weightserver.core.errors import StorageError

TOMBSTONE = "compacted-to"
PARTIAL = "data.mdb.partial"
"""The copy in the new directory, until it is complete and the old one is marked."""


def copied_to(directory: Path) -> Path | None:
    """The copy of the directory; None if it has no tombstone."""
    tombstone = directory / TOMBSTONE
    if not os.path.lexists(tombstone):
        return None
    return tombstone.readlink() if tombstone.is_symlink() else tombstone


def is_stopped(target: Path) -> bool:
    """Whether a `compact` to `target` was stopped before the copy took its place."""
    return (target / PARTIAL).exists()


def require_current(directory: Path) -> None:
    """Raises StorageError if the directory was copied by `compact`."""
    if (target := copied_to(directory)) is None:
        return
    what = f"to serve the old data nevertheless, remove {directory / TOMBSTONE}"
    if is_stopped(target):
        raise StorageError(
            f"{directory} is being compacted to {target}: repeat 'weightserver compact {directory} --output {target}' "
            f"if that was stopped; {what}"
        )
    raise StorageError(f"{directory} was compacted to {target}: serve that copy; {what}")


def leave_tombstone(directory: Path, target: Path) -> None:
    """Marks the directory as copied to `target`, durably; does nothing if it is marked or read-only.

    Raises:
        OSError: it cannot be marked.
    """
    if copied_to(directory) == target:
        return
    try:
        (directory / TOMBSTONE).symlink_to(target)
        sync(directory)
    except OSError as error:
        if error.errno != errno.EROFS:  # a directory on a read-only disk cannot be served
            raise OSError(f"{directory} cannot be marked as compacted ({error})") from None
