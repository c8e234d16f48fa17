"""Group commit: one thread applies the writes of all callers and answers each after the commit that contains it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from weightserver.core.errors import OverloadedError

Result = TypeVar("Result")
MAX_GROUP = 64
MAX_WAITING = 256


class CancellableFuture(Future[Result]):
    """An operation, and its result: its effect is durable, or it failed without an effect.

    It can be cancelled while the operation runs: the operation sees `WriteTransaction.is_cancelled`.
    """

    def __init__(self, operation: Callable[[Any], Result]) -> None:
        super().__init__()
        self.is_cancelled = False
        self.since = time.perf_counter()
        self._operation: Callable[[Any], Result] | None = operation
        # The arrays of a write live no longer than it: not while a cancelled one waits in the queue.
        self.add_done_callback(lambda done: vars(done).update(_operation=None))

    def cancel(self) -> bool:
        self.is_cancelled = True
        return super().cancel()

    def run(self, batch: Any) -> Result:
        """Runs the operation in a transaction."""
        assert self._operation is not None
        batch.is_cancelled = lambda: self.is_cancelled
        return self._operation(batch)


class Committer:
    """Runs operations in the order of their arrival, all waiting ones in one transaction.

    Args:
        on_commit: called with the seconds that each operation of a group waited, and those that the group took.
    """

    def __init__(
        self,
        transaction: Callable[[], AbstractContextManager[Any]],
        on_commit: Callable[[list[float], float], None] = lambda waits, seconds: None,
    ) -> None:
        self._transaction = transaction
        self._on_commit = on_commit
        self._waiting = deque[CancellableFuture[Any]]()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="committer")
        self._thread.start()

    def submit(self, operation: Callable[[Any], Result]) -> CancellableFuture[Result]:
        """Queues `operation`.

        Raises:
            OverloadedError: too many operations are waiting, or the committer is closed.
        """
        future = CancellableFuture(operation)
        with self._changed:
            if self._closed or len(self._waiting) >= MAX_WAITING:
                raise OverloadedError("the shard has no room for another write now: try again")
            self._waiting.append(future)
            self._changed.notify()
        return future

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def close(self, seconds: float | None = None) -> bool:
        """Commits what is waiting, then ends the thread; returns False if that takes longer than `seconds`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while group := self._next_group():
            started = time.perf_counter()
            wanted = [future for future in group if future.set_running_or_notify_cancel()]
            commit_group(self._transaction, wanted)
            self._on_commit([started - future.since for future in wanted], time.perf_counter() - started)

    def _next_group(self) -> list[CancellableFuture[Any]]:
        """Empty once the committer is closed and nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return [self._waiting.popleft() for _ in range(min(MAX_GROUP, len(self._waiting)))]


def commit_group(transaction: Callable[[], AbstractContextManager[Any]], group: list[CancellableFuture[Any]]) -> None:
    """Runs the operations in one transaction, and answers them after its commit.

    If an operation raises, the whole transaction is undone, and each operation of the group runs again in a transaction
    of its own. So an operation may raise at any point and leaves no trace.
    """
    try:
        with transaction() as batch:
            results = [future.run(batch) for future in group]
    except Exception as error:  # noqa: BLE001 - the caller receives any error, and the thread continues
        if len(group) == 1:
            group[0].set_exception(error)
        else:
            for single in group:
                commit_group(transaction, [single])
    else:
        for future, result in zip(group, results, strict=True):
            future.set_result(result)
