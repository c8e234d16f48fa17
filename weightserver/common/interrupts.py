"""How every command ends by Ctrl-C, and says so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from weightserver.common.object_store import end_soon


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C also end what other threads ask object stores, before it raises KeyboardInterrupt."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or another's
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        end_soon()
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interruption(when: str = "", hint: str = "") -> str:
    """The words about it: "interrupted", `when`, and what the user can do."""
    return " ".join(filter(None, ("interrupted", when))) + (f": {hint}" if hint else "")
