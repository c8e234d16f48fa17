"""Finds versions of blocks that no state needs any more, and deletes them a little at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from weightserver.core.checkpoints import ShardCheckpoint
from weightserver.core.versions import Version, by_block, unneeded
from weightserver.shard.transaction import WriteTransaction
from weightserver.storage.interface import Storage

Submit = Callable[[Callable[[WriteTransaction], None]], Future[None]]


class VersionCollector:
    """Goes over all blocks, at the start of a shard and after each release. One thread at a time collects."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._passes = 1
        """Passes to begin: a checkpoint that is released during one may leave versions behind it."""
        self._next_block: int | None = None
        """Where to continue the pass under way."""

    @property
    def is_done(self) -> bool:
        return self._next_block is None and not self._passes

    def start(self) -> None:
        """Begins a pass, after the one under way."""
        self._passes = 1

    def collect(self, checkpoints: Callable[[], Sequence[ShardCheckpoint]], submit: Submit, seconds: float) -> None:
        """Looks for versions to delete for about `seconds`, and has them deleted; the next call continues there."""
        if self._next_block is None:
            self._passes, self._next_block = 0, 0
        until, found, next_block = time.perf_counter() + seconds, list[int](), None
        with self._storage.read() as txn:
            for block, versions in by_block(txn.versions(self._next_block)):
                if unneeded(versions, checkpoints()):
                    found.append(block)
                if time.perf_counter() >= until:
                    next_block = block + 1
                    break

        def delete(batch: WriteTransaction) -> None:
            for block in found:
                delete_unneeded(batch, block)

        if found:
            submit(delete).result()
        self._next_block = next_block


def delete_unneeded(batch: WriteTransaction, block: int) -> None:
    """Deletes the versions of a block that neither the newest state nor a checkpoint needs."""
    for version in unneeded(versions_of(batch, block), batch.state.checkpoints):
        batch.txn.delete_block(version)


def versions_of(batch: WriteTransaction, block: int) -> list[Version]:
    """A block's versions, newest first."""
    found, versions = next(by_block(batch.txn.versions(block)), (block, []))
    return versions if found == block else []
