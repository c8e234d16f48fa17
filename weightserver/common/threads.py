"""A call that no signal interrupts halfway.

Python raises KeyboardInterrupt in the main thread before nearly any instruction of Python code, also in
`threading.Condition.__enter__` after it has acquired its lock, which is then never released: executors, futures and
`Thread.start`, which are built from conditions, may never end. `SimpleQueue` and `start_new_thread` are not.
"""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")
_LOOK_SECONDS = 0.2
"""A signal that arrives just before the main thread begins to wait does not end the wait: Python notices it later."""


def in_other_thread(call: Callable[[], Result], look: Callable[[], None] = lambda: None) -> Result:
    """Makes a call in a thread of its own, which an interrupt of this one, or the end of the process, leaves behind.

    Args:
        look: called again and again until the call returns; what it raises ends the wait.
    """
    answers = SimpleQueue[tuple[list[Result], list[BaseException]]]()

    def run() -> None:
        try:
            answers.put(([call()], []))
        except BaseException as error:  # noqa: BLE001 - raised below
            answers.put(([], [error]))

    start_new_thread(run, ())
    while True:
        try:
            results, errors = answers.get(timeout=_LOOK_SECONDS)
        except Empty:
            look()
            continue
        for error in errors:
            raise error
        return results[0]
