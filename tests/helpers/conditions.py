"""The locks of executors and futures, which an interrupt of the main thread may leave taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def no_condition_in_this_thread() -> Iterator[None]:
    """Fails where this thread enters a condition: KeyboardInterrupt amid `Condition.__enter__` would leave a lock taken
    that other threads need to end."""
    here, enter = threading.get_ident(), threading.Condition.__enter__

    def entered(condition: threading.Condition) -> bool:
        assert threading.get_ident() != here
        return enter(condition)

    with patch.object(threading.Condition, "__enter__", entered):
        yield
