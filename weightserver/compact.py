"""A shard's directory that nobody serves, copied without the pages that are free."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from weightserver.errors import StorageError
from weightserver.files import PRIVATE_DIRECTORY, PRIVATE_FILE, require_empty, sync, write_whole
from weightserver.records import read_identity
from weightserver.storage import LmdbStorage, require_sound


def compact(source: Path, target: Path) -> None:
    """Copies a directory to a new one, or to one that is empty, such as a volume of its own.

    Raises:
        ValueError: it is not empty. OSError: it cannot be written.
        StorageError: the source is damaged, of another format, or another process serves it.
    """
    target = target.resolve()
    require_empty(target, but=frozenset({"data.mdb.partial", "lost+found"}))
    require_sound(source)
    with closing(LmdbStorage(source, readonly=True)) as storage:
        with storage.read() as txn:
            if read_identity(txn) is None:
                raise StorageError(f"{source} holds no shard: there is nothing to copy")
        target.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        write_whole(target / "data.mdb", storage.copy, mode=PRIVATE_FILE)
        sync(target.parent)
