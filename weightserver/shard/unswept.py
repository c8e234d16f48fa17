"""Finds versions of blocks that no checkpoint needs any more, and deletes them a little at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from weightserver.core.checkpoints import ShardCheckpoint
from weightserver.core.versions import unneeded
from weightserver.shard.transaction import WriteTransaction
from weightserver.shard.writing import delete_unneeded
from weightserver.storage.interface import Storage

Submit = Callable[[Callable[[WriteTransaction], None]], Future[None]]


class Unswept:
    """Generations that a sweep has to look at. Operations add some; one thread at a time sweeps."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._ranges: deque[tuple[int, int, int]] = deque()
        """(generation, block) to look at next, and the generation to end before."""

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, generations: range) -> None:
        if generations:
            self._ranges.append((generations.start, 0, generations.stop))

    def sweep(self, checkpoints: Callable[[], Sequence[ShardCheckpoint]], submit: Submit, seconds: float) -> None:
        """Looks for versions to delete for about `seconds`, and has them deleted; the next call continues there."""
        until = time.perf_counter() + seconds
        (generation, block, end), found = self._ranges[0], list[int]()
        with self._storage.read() as txn:
            while (change := txn.next_change(generation, block)) is not None and change[0] < end:
                generation, block = change
                if unneeded(txn.generations(block), checkpoints()):
                    found.append(block)
                block += 1
                if time.perf_counter() >= until:
                    break

        def delete(batch: WriteTransaction) -> None:
            for block in found:
                delete_unneeded(batch, block)

        if found:
            submit(delete).result()
        if change is None or change[0] >= end:
            self._ranges.popleft()
        else:
            self._ranges[0] = generation, block, end  # meanwhile operations have only appended
