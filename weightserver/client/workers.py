"""Threads that make a client's calls for its callers, whom a signal may interrupt anywhere.

Python raises the exception of a signal's handler in the main thread, before nearly any instruction of Python code: also
in `threading.Condition.__enter__` after it has acquired its lock, which is then never released. gRPC, `Future` and
`ThreadPoolExecutor` are built from conditions. So the main thread uses none of these: it shares with other threads only
a `SimpleQueue`, and plain locks in a `with`, which are C code that a signal cannot interrupt halfway.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")
Answers = SimpleQueue[tuple[int, Any]]
"""Numbers of calls, and what they returned or raised."""


@dataclass
class _Caller:
    """The caller of a worker's task."""

    has_left: bool = False


_caller: contextvars.ContextVar[_Caller] = contextvars.ContextVar("caller")


class Task(NamedTuple):
    """One call for a worker to make."""

    caller: _Caller
    answers: Answers
    number: int
    call: Callable[..., Any]
    arguments: tuple[Any, ...]

    def do(self) -> None:
        token = _caller.set(self.caller)
        try:
            self.answers.put((self.number, self.call(*self.arguments)))
        except BaseException as error:  # noqa: BLE001 - it concerns the caller, not the thread
            self.answers.put((self.number, error))
        finally:
            _caller.reset(token)


class Workers:
    """A thread for each concurrent call. Threads start with the first call and end after `end`."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = threading.RLock()  # a finalizer that calls `end` may run anywhere
        self._working = threading.Lock()
        """Held while any thread exists."""
        self._num_threads = 0
        self._num_idle = 0
        """Number of threads that wait for a task, or will as soon as they have started."""
        self._ended = False

    def outcomes(self, call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Calls once for each of the arguments, all at the same time; returns their results, or the errors they raised.
        Callers in other threads than the main one make the first call themselves.

        An interrupt of the caller leaves the calls running: see `check`.
        """
        answers: Answers = SimpleQueue()
        caller = _Caller()
        try:
            tasks = [Task(caller, answers, number, call, those) for number, those in enumerate(arguments)]
            own = int(threading.current_thread() is not threading.main_thread())  # no signal interrupts those
            self._submit(tasks[own:])
            for task in tasks[:own]:
                task.do()
            found = dict(self._next(answers) for _ in tasks)
            return [found[number] for number in range(len(tasks))]
        except BaseException:
            caller.has_left = True
            raise

    def run(self, call: Callable[[], Result]) -> Result:
        """Makes one call: in this thread if it is a worker."""
        if _caller.get(None) is not None:
            return call()
        (outcome,) = self.outcomes(call, [()])
        if isinstance(outcome, BaseException):
            raise outcome
        result: Result = outcome
        return result

    @staticmethod
    def check() -> None:
        """Raises CancelledError in a worker whose caller no longer waits for its call."""
        if _caller.get().has_left:
            raise CancelledError

    def end(self) -> None:
        """Lets the threads end once they have done what was submitted; later calls are refused."""
        with self._lock:
            self._ended = True
            self._tasks.put(None)

    def wait(self) -> None:
        """Returns when all threads have ended."""
        with self._working:
            pass

    # ---- in the caller's thread

    def _submit(self, tasks: list[Task]) -> None:
        with self._lock:
            if tasks and self._ended:
                raise ValueError("the client is closed: make a new one")
            for task in tasks:
                self._tasks.put(task)
        for _ in range(self._tasks.qsize() - self._num_idle):
            _thread.start_new_thread(self._begin, ())  # the caller of Thread.start() waits for a condition

    def _next(self, answers: Answers) -> tuple[int, Any]:
        return answers.get()

    # ---- in other threads, which no signal interrupts

    def _begin(self) -> None:
        """Starts a worker if there are more tasks than idle workers."""
        with self._lock:
            if self._tasks.qsize() <= self._num_idle:
                return
            if not self._num_threads:
                self._working.acquire()
            self._num_threads += 1
            self._num_idle += 1
        try:
            threading.Thread(target=self._serve, name="weight-client", daemon=True).start()
        except RuntimeError:  # there are too many threads
            self._serve()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            with self._lock:
                self._num_idle -= 1
            if self._tasks.qsize() > self._num_idle:  # a caller counted this thread as idle
                with contextlib.suppress(RuntimeError):  # too many threads: the next task waits for this one
                    _thread.start_new_thread(self._begin, ())
            task.do()
            del task  # it holds the client
            with self._lock:
                self._num_idle += 1
        self._tasks.put(None)
        with self._lock:
            self._num_threads -= 1
            self._num_idle -= 1
            if not self._num_threads:
                self._working.release()
