"""Deletes versions of blocks that a release left unneeded, slowly, while the shard serves."""

from __future__ import annotations

import logging
import threading
import time

from weightserver.core.errors import WeightServerError
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard

SHARE = 0.05
"""Share of the time in which a sweep may run, and so of one core and of the disk."""
LOOK_SECONDS = 0.002
"""How long to look for versions at a time; deleting them in a transaction takes as long again, or longer."""
_IDLE_SECONDS = 1.0
"""How often to check whether a checkpoint was released."""
_RETRY_SECONDS = 10.0
"""How long to wait after an error, such as a full disk."""

_log = logging.getLogger(__name__)


class Sweeper:
    """A thread that runs short sweeps through the committer, with pauses between them; idle once all is swept.

    It may be stopped between two sweeps: the next start of the shard sweeps everything again.
    """

    def __init__(self, shard: Shard, committer: Committer) -> None:
        self._shard = shard
        self._committer = committer
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, between two sweeps."""
        self._stopped.set()

    def _run(self) -> None:
        pause, failing = _IDLE_SECONDS, False
        while not self._stopped.wait(pause):
            if self._shard.is_collected:
                pause = _IDLE_SECONDS
                continue
            started = time.perf_counter()
            try:
                self._shard.collect(self._committer.submit, LOOK_SECONDS)
            except (WeightServerError, OSError) as error:
                if not failing:
                    _log.warning("old versions of blocks cannot be deleted now: %(reason)s", {"reason": str(error)})
                pause, failing = _RETRY_SECONDS, True
            else:
                pause, failing = (time.perf_counter() - started) * (1 / SHARE - 1), False
