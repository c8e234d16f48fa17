"""Copies a shard's directory that is not being served, without free pages and unneeded versions of blocks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from weightserver.common.atomic_files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    make_directory,
    require_empty,
    sync,
    to_path,
)
from weightserver.core.blocks import BlockCodec
from weightserver.core.errors import StorageError
from weightserver.core.versions import Version, by_block, needed
from weightserver.storage.interface import Transaction
from weightserver.storage.lmdb_storage import LmdbStorage
from weightserver.storage.records import read_identity, read_spec, read_state
from weightserver.storage.tombstone import PARTIAL, copied_to, is_stopped, leave_tombstone, require_current


def compact(source: Path, target: Path) -> None:
    """Copies a directory to a new or empty one, such as the root of a volume.

    Marks the source as copied before the copy can be served, so that no later write to the old data is lost. After a
    kill at any moment, repeating the call completes it.

    Raises:
        ValueError: the target is not empty.
        OSError: the target cannot be written, or the source cannot be marked.
        StorageError: the source is damaged, of another format, already copied, or served by another process.
    """
    target = target.resolve()
    _require_uncopied(source, target)
    require_empty(target, but=frozenset({PARTIAL, "lost+found"}))
    with closing(LmdbStorage(source, readonly=True)) as storage:
        _require_uncopied(source, target)  # the open storage now keeps other processes out
        with storage.read() as txn:
            identity = read_identity(txn)
            if identity is None or identity.unfinished:
                raise StorageError(f"{source} holds no complete shard: there is nothing to copy")
            txn.check_contents()
        make_directory(target, mode=PRIVATE_DIRECTORY)
        copy = target / PARTIAL
        try:
            copy.touch(PRIVATE_FILE)
            os.truncate(copy, 0)
            storage.copy(copy, _needed_blocks)
            sync(copy)
            sync(target)
            leave_tombstone(source, target)
        except BaseException as error:
            if copied_to(source) == target:
                os.truncate(copy, 0)  # its presence says that a repeated call may complete the copy
            else:
                copy.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise OSError(f"{source} cannot be copied to {target} ({error})") from None
            raise
        copy.replace(target / "data.mdb")
        sync(target)


def _needed_blocks(txn: Transaction) -> Iterator[tuple[Version, memoryview]]:
    """The versions of blocks that the newest state or a checkpoint needs, checked."""
    spec, checkpoints = read_spec(txn), read_state(txn).checkpoints
    if spec is None:
        return
    codec = BlockCodec(spec)
    for _, versions in by_block(txn.versions()):
        for version in needed(versions, checkpoints):
            content = txn.content(version)
            codec.check(version.block, version.write_id, content)
            yield version, content


def _require_uncopied(source: Path, target: Path) -> None:
    if not (copied_to(source) == target and is_stopped(target)):
        require_current(source)


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=to_path, help="the --data-dir of a shard")
    parser.add_argument("--output", type=to_path, required=True, help="a new directory")


def run(arguments: argparse.Namespace) -> None:
    source, target = arguments.directory, arguments.output
    compact(source, target)
    before, after = ((directory / "data.mdb").stat().st_blocks * 512 for directory in (source, target))
    print(f"{source} takes {before} bytes, {target} {after}")
