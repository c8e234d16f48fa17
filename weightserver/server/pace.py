"""The pace of searches: short calls, and pauses while a training run fetches or writes rows."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

SEARCH_SECONDS = 1.0
"""Time of one search call, after which the caller asks for the rest."""
_TRAINING_SECONDS = 1.0
"""How long after its last call a training run is expected to call again."""


class Pace:
    """Keeps searches from slowing down a training run. Thread-safe."""

    def __init__(self) -> None:
        self._last_training = -_TRAINING_SECONDS

    def note_training(self) -> None:
        """Records that rows are being fetched or written."""
        self._last_training = time.monotonic()

    def budget(self, context: grpc.ServicerContext) -> Callable[[], bool]:
        """Returns a function that says whether a search that begins now may continue, to be called after each chunk.

        A search ends after a second, or half of the time that its caller allows, or when the caller is gone. While a
        training run is active, the function first pauses for as long as the chunk took.
        """
        remaining = context.time_remaining()
        began = time.monotonic()
        end = began + min(SEARCH_SECONDS, SEARCH_SECONDS if remaining is None else remaining / 2)

        def may_continue() -> bool:
            nonlocal began
            now = time.monotonic()
            if now - self._last_training < _TRAINING_SECONDS:
                time.sleep(min(now - began, max(0.0, end - now)))
            began = time.monotonic()
            return began < end and bool(context.is_active())

        return may_continue
