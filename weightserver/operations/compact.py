"""Copies a shard's directory that nobody serves, without free pages and the versions that nothing needs."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

from weightserver.common.atomic_files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    make_directory,
    require_empty,
    sync,
    write_synced,
)
from weightserver.core.errors import StorageError
from weightserver.core.versions import unneeded
from weightserver.storage.integrity import check_integrity
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import read_identity, read_state
from weightserver.storage.tombstone import copied_to, is_stopped, leave_tombstone, require_current


def compact(source: Path, target: Path) -> None:
    """Copies a directory to a new one, or to one that is empty, such as a volume of its own.

    The source is marked as copied before the copy can be served, so that no write goes to the old data and is lost.
    After a kill at any moment the same call completes.

    Raises:
        ValueError: the target is not empty.
        OSError: it cannot be written, or the source cannot be marked.
        StorageError: the source is damaged, of another format or copied before, or another process serves it.
    """
    target = target.resolve()
    _require_uncopied(source, target)
    require_empty(target, but=frozenset({"data.mdb.partial", "lost+found"}))
    check_integrity(source)
    with closing(LmdbStorage(source, readonly=True)) as storage:
        _require_uncopied(source, target)  # nobody can copy or serve it from here on
        with storage.read() as txn:
            identity = read_identity(txn)
            if identity is None or identity.unfinished:
                raise StorageError(f"{source} holds no shard that can be served: there is nothing to copy")
            checkpoints = read_state(txn).checkpoints
        make_directory(target, mode=PRIVATE_DIRECTORY)
        copy = target / "data.mdb.partial"
        try:
            write_synced(
                copy, partial(storage.copy, unneeded=partial(unneeded, checkpoints=checkpoints)), mode=PRIVATE_FILE
            )
            sync(target)
            leave_tombstone(source, target)
        except OSError as error:
            copy.unlink(missing_ok=True)
            raise OSError(f"{source} cannot be copied to {target} ({error})") from None
        except BaseException:
            copy.unlink(missing_ok=True)
            raise
        copy.replace(target / "data.mdb")
        sync(target)


def _require_uncopied(source: Path, target: Path) -> None:
    if not (copied_to(source) == target and is_stopped(target)):
        require_current(source)
