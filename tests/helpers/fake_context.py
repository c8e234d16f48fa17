"""A caller without a connection."""

from __future__ import annotations

from collections.abc import Callable

from weightserver import __version__
from weightserver.protocol.codec import VERSION_KEY, WAITED_KEY


class FakeContext:
    """A caller that disappears when the test says so, and reports how long it has waited."""

    def __init__(self, waited_ms: str = "") -> None:
        self.gone: list[Callable[[], object]] = []
        self._waited_ms = waited_ms

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(VERSION_KEY, __version__), *([(WAITED_KEY, self._waited_ms)] if self._waited_ms else [])]

    def add_callback(self, callback: Callable[[], object]) -> bool:
        self.gone.append(callback)
        return True
