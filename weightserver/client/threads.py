"""Calls of several shards at once. The caller makes the first itself, and a thread each of the others.

Nothing here is built from conditions, as `Future`, `Thread.start` and executors are (see `common/threads.py`): threads
share with their caller only a `SimpleQueue`. gRPC is built from conditions too: see `channels.py`.

An interrupt of the caller leaves the other calls running. They make no further attempt, and leave the arrays alone that
the caller lent them: see `Caller`.
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from weightserver.core.errors import ShardUnavailableError, WeightServerError

Result = TypeVar("Result")
Answers = SimpleQueue[tuple[int, Any]]
"""Numbers of calls, and what they returned or raised."""
_WAIT_SECONDS = 0.2
"""The longest wait between two looks for signals, as in gRPC."""


class Caller:
    """Who waits for calls that other threads make, and lends them arrays."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by a thread while it uses the arrays: entered itself, as a signal may come anywhere."""
        self._has_left = False

    def require(self) -> None:
        """Raises CancelledError once the caller has left."""
        if self._has_left:
            raise CancelledError

    def leave(self) -> None:
        self._has_left = True  # first, as a second signal may come while this waits for a thread
        with self.lock:
            pass


_caller: ContextVar[Caller] = ContextVar("caller")


def outcomes(
    call: Callable[..., Any],
    arguments: Iterable[tuple[Any, ...]],
    *,
    caller: Caller | None = None,
    not_main: bool = False,
) -> list[Any]:
    """Calls once for each of the arguments, all at the same time; returns what they returned, or the WeightServerErrors
    they raised. Any other error of a call is raised here.

    Args:
        caller: leaves when this returns or raises.
        not_main: whether the main thread makes no call itself, since it is the only one that signals interrupt. Needed
            for calls that other threads also wait for: gRPC reads a stream that is sent in a thread of its own, which
            ends the process if the call is interrupted, and who closes a channel takes locks that its calls need.
    """
    caller, answers, every = caller or Caller(), Answers(), list(arguments)
    first = int(not not_main or threading.current_thread() is not threading.main_thread())
    found: dict[int, Any] = {}
    try:
        for number in range(first, len(every)):
            try:
                start_new_thread(_answer, (caller, answers, number, call, every[number]))
            except RuntimeError:  # there are too many threads
                found[number] = _outcome(call, every[number])
        if every and first:
            found[0] = _outcome(call, every[0])
        while len(found) < len(every):
            try:
                number, outcome = answers.get(timeout=_WAIT_SECONDS)
            except Empty:
                continue
            if isinstance(outcome, BaseException) and not isinstance(outcome, WeightServerError):
                raise outcome
            found[number] = outcome
    finally:
        caller.leave()
    return [found[number] for number in range(len(every))]


def outside_main(call: Callable[[], Result]) -> Result:
    """Makes a call in another thread than the main one, where an interrupt could leave a lock taken; returns what it
    returned."""
    found = outcomes(call, [()], not_main=True)
    raise_first(found)
    returned: Result = found[0]
    return returned


def raise_first(outcomes: list[Any]) -> None:
    """Raises the first error among the outcomes, if there is any. It names all shards that did not answer."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not errors:
        return
    silent = [error.shard for error in errors if isinstance(error, ShardUnavailableError)]
    if isinstance(errors[0], ShardUnavailableError) and silent[1:]:
        errors[0].args = (f"{errors[0]}; nor did {', '.join(silent[1:])} answer",)
    raise errors[0]


def is_not_applied(outcomes: list[Any]) -> bool:
    """Whether every shard is proven to have done nothing."""
    return all(isinstance(outcome, WeightServerError) and outcome.not_applied for outcome in outcomes)


def require_caller() -> None:
    """Raises CancelledError in a thread whose caller no longer waits for its call."""
    if (caller := _caller.get(None)) is not None:
        caller.require()


def _answer(
    caller: Caller, answers: Answers, number: int, call: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Makes a call in a thread of its own."""
    _caller.set(caller)
    try:
        outcome = call(*arguments)
    except BaseException as error:  # noqa: BLE001 - it concerns the caller, not the thread
        outcome = error
    answers.put((number, outcome))


def _outcome(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return call(*arguments)
    except WeightServerError as error:
        return error
