"""Group commit: one thread applies the writes of all callers and answers each after the commit that contains it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from weightserver.core.errors import OverloadedError

Batch = TypeVar("Batch")
Result = TypeVar("Result")
MAX_GROUP = 64
MAX_WAITING = 256


Operation = tuple[Callable[[Any], Any], Future[Any]]
"""A change to make in a transaction, and the future of its result."""


class CancellableFuture(Future[Result]):
    """The result of an operation: its effect is durable, or it failed without an effect.

    It can be cancelled while the operation runs: the operation sees `WriteTransaction.is_cancelled`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_cancelled = False

    def cancel(self) -> bool:
        self.is_cancelled = True
        return super().cancel()


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
        self._waiting: queue.Queue[tuple[Operation, float] | None] = queue.Queue(MAX_WAITING)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="committer")
        self._thread.start()

    def submit(self, operation: Callable[[Any], Result]) -> CancellableFuture[Result]:
        """Queues `operation`.

        Raises:
            OverloadedError: too many operations are waiting.
        """
        future = CancellableFuture[Result]()
        waiting = [operation]  # emptied on cancellation, so that the queue does not keep its arrays

        def run(batch: Any) -> Result:
            batch.is_cancelled = lambda: future.is_cancelled
            return waiting[0](batch)

        future.add_done_callback(lambda _: waiting.clear())
        try:
            if self._closed:
                raise queue.Full
            self._waiting.put_nowait(((run, future), time.perf_counter()))
        except queue.Full:
            raise OverloadedError("the shard has no room for another write now: try again") from None
        return future

    @property
    def num_waiting(self) -> int:
        return self._waiting.qsize()

    def close(self, seconds: float | None = None) -> bool:
        """Commits what is waiting, then ends the thread; returns False if that takes longer than `seconds`."""
        self._closed = True
        self._waiting.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            wanted = [(operation, since) for operation, since in group if operation[1].set_running_or_notify_cancel()]
            started = time.perf_counter()
            commit_group(self._transaction, [operation for operation, _ in wanted])
            self._on_commit([started - since for _, since in wanted], time.perf_counter() - started)

    def _next_group(self) -> list[tuple[Operation, float]] | None:
        first = self._waiting.get()
        if first is None:
            return None
        group = [first]
        while len(group) < MAX_GROUP and not self._waiting.empty():
            item = self._waiting.get_nowait()
            if item is None:
                self._waiting.put(None)  # close() was called: end after this group
                break
            group.append(item)
        return group


def commit_group(transaction: Callable[[], AbstractContextManager[Any]], group: list[Operation]) -> None:
    """Runs the operations in one transaction, and answers them after its commit.

    If an operation raises, the whole transaction is undone, and each operation of the group runs again in a transaction
    of its own. So an operation may raise at any point and leaves no trace. An operation with an action after the commit
    ends its group: later ones must see the action's effect.
    """
    results: list[Any] = []
    try:
        with transaction() as batch:
            for operation, _ in group:
                results.append(operation(batch))
                if batch.after_commit:
                    break
    except Exception as error:  # noqa: BLE001 - the caller receives any error, and the thread continues
        if len(group) == 1:
            group[0][1].set_exception(error)
        else:
            for single in group:
                commit_group(transaction, [single])
    else:
        for (_, future), result in zip(group, results, strict=False):
            future.set_result(result)
        if rest := group[len(results) :]:
            commit_group(transaction, rest)
