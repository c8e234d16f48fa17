"""Threads that make a client's calls for its callers, whom a signal may interrupt anywhere.

Python raises what a signal's handler raises in the main thread, before nearly any instruction of Python code: also in
`threading.Condition.__enter__` when it has its lock, which is then taken for ever. gRPC, `Future` and
`ThreadPoolExecutor` are made of conditions. So the main thread uses none of these: what it shares with others are
a `SimpleQueue` and plain locks in a `with`, which are C code that a signal finds either before or behind.
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
    """Of a worker's task."""

    has_left: bool = False


_caller: contextvars.ContextVar[_Caller] = contextvars.ContextVar("caller")


class Task(NamedTuple):
    """One call that a worker is to make."""

    caller: _Caller
    answers: Answers
    number: int
    call: Callable[..., Any]
    arguments: tuple[Any, ...]

    def do(self) -> None:
        token = _caller.set(self.caller)
        try:
            self.answers.put((self.number, self.call(*self.arguments)))
        except BaseException as error:  # noqa: BLE001 - the caller's, and no thread's
            self.answers.put((self.number, error))
        finally:
            _caller.reset(token)


class Workers:
    """As many threads as there are calls at a time; they begin with the first call, and end when `end` says so."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = threading.RLock()  # a finalizer that calls `end` may run anywhere
        self._working = threading.Lock()
        """Held while there are threads."""
        self._num_threads = 0
        self._num_idle = 0
        """Threads that wait for a task, or will as soon as they have started."""
        self._ended = False

    def outcomes(self, call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Calls once for each of the arguments, all at a time; what the calls returned, or the errors that they raised.
        Other threads than the main one make the first call themselves.

        An interrupt of the caller leaves them behind: see `check`.
        """
        answers: Answers = SimpleQueue()
        caller = _Caller()
        try:
            tasks = [Task(caller, answers, number, call, those) for number, those in enumerate(arguments)]
            own = int(threading.current_thread() is not threading.main_thread())  # which no signal interrupts
            self._submit(tasks[own:])
            for task in tasks[:own]:
                task.do()
            found = dict(self._next(answers) for _ in tasks)
            return [found[number] for number in range(len(tasks))]
        except BaseException:
            caller.has_left = True
            raise

    def run(self, call: Callable[[], Result]) -> Result:
        """Makes one call: in this thread, if it is one of the workers."""
        if _caller.get(None) is not None:
            return call()
        (outcome,) = self.outcomes(call, [()])
        if isinstance(outcome, BaseException):
            raise outcome
        result: Result = outcome
        return result

    @staticmethod
    def check() -> None:
        """Raises CancelledError in a worker's thread where nobody waits for its call any more."""
        if _caller.get().has_left:
            raise CancelledError

    def end(self) -> None:
        """Lets the threads end when they have done what was submitted; they take nothing else."""
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
        """Starts a worker where there are more tasks than idle ones."""
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
            if self._tasks.qsize() > self._num_idle:  # a caller took this thread for idle
                with contextlib.suppress(RuntimeError):  # too many threads: it comes after this task
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
