"""Progress of a protocol, shown by its caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Advance(Protocol):
    def __call__(self, n: int = 1, /, **shown: float) -> None:
        """Advances by `n` of the total; `shown` are values to show, such as the loss."""


class Progress(Protocol):
    def __call__(self, description: str, total: int, /) -> AbstractContextManager[Advance]:
        """Shows a stage of `total` parts until the context ends."""


@contextmanager
def no_progress(description: str, total: int, /) -> Iterator[Advance]:
    """Shows nothing."""
    yield lambda n=1, /, **shown: None
