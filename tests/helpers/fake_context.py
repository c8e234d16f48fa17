"""A caller without a connection."""

from __future__ import annotations

from collections.abc import Callable

from weightserver import __version__
from weightserver.protocol.codec import VERSION_KEY


class FakeContext:
    """A caller that disappears when the test says so."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self._callbacks: list[Callable[[], object]] = []
        self._is_gone = is_gone

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(VERSION_KEY, __version__)]

    def add_callback(self, callback: Callable[[], object]) -> bool:
        self._callbacks.append(callback)
        return not self._is_gone

    @property
    def num_callbacks(self) -> int:
        return len(self._callbacks)

    def leave(self) -> None:
        """Ends the call, as its caller does by leaving or by having taken its answer."""
        for callback in self._callbacks:
            callback()
