"""Deletes versions of blocks that no state needs any more: a block's when it is written, all others in sweeps.

It also looks at the readers of other processes, for which the file grows.
"""

from __future__ import annotations

import logging
import threading
import time

from weightserver.core.errors import WeightServerError
from weightserver.core.versions import by_block, unneeded
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteTransaction

SHARE = 0.05
"""Share of the time in which a sweep may run, and so of one core and of the disk."""
LOOK_SECONDS = 0.002
"""How long to look for versions at a time; deleting them in a transaction takes as long again, or longer."""
_IDLE_SECONDS = 1.0
"""How often to look whether a checkpoint was released, and at readers."""
_RETRY_SECONDS = 10.0
"""How long to wait after an error, such as a full disk."""

_log = logging.getLogger(__name__)


class Sweeper:
    """Goes over all blocks, after the start of a shard and after each release, in short parts with pauses between them.

    It may be stopped between two parts: the next start of the shard sweeps everything again.
    """

    def __init__(self, shard: Shard, committer: Committer) -> None:
        self._shard = shard
        self._committer = committer
        self._swept = -1
        """How many releases there had been when the newest sweep began."""
        self._next_block: int | None = None
        """Where to continue the sweep under way."""
        self._stopped = threading.Event()

    def start(self) -> None:
        """Sweeps in a thread of its own from now on."""
        threading.Thread(target=self._run, name="sweeper", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, between two parts."""
        self._stopped.set()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to delete."""
        return self._next_block is None and self._swept == self._shard.num_releases

    def sweep(self, seconds: float) -> None:
        """Looks for versions to delete for about `seconds`, and has them deleted; the next call continues there."""
        if self._next_block is None:
            self._swept, self._next_block = self._shard.num_releases, 0
        until, found, next_block = time.perf_counter() + seconds, list[int](), None
        with self._shard.storage.read() as txn:
            for block, versions in by_block(txn.versions(self._next_block)):
                if unneeded(versions, self._shard.state.checkpoints):
                    found.append(block)
                if time.perf_counter() >= until:
                    next_block = block + 1
                    break

        def delete(batch: WriteTransaction) -> None:
            batch.to_sweep += found

        if found:
            self._committer.submit(delete).result()
        self._next_block = next_block

    def _run(self) -> None:
        pause, failing = _IDLE_SECONDS, False
        while not self._stopped.wait(pause):
            started = time.perf_counter()
            try:
                self._shard.storage.look_at_readers()
                if self.is_done:
                    pause, failing = _IDLE_SECONDS, False
                    continue
                self.sweep(LOOK_SECONDS)
            except (WeightServerError, OSError) as error:
                if not failing and not self._stopped.is_set():  # or the shard is closing
                    _log.warning("old versions of blocks cannot be deleted now: %(reason)s", {"reason": str(error)})
                pause, failing = _RETRY_SECONDS, True
            else:
                pause, failing = (time.perf_counter() - started) * (1 / SHARE - 1), False
