"""Progress of a protocol, shown by its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[..., None]
"""advance(n=1, **shown): n more items are done; `shown` are numbers to show, tensors such as loss=…."""
Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""progress(description, total) shows a stage of `total` items until the context ends."""


@contextmanager
def no_progress(description: str, total: int) -> Iterator[Advance]:
    """Shows nothing."""

    def advance(n: int = 1, **shown: object) -> None:
        pass

    yield advance
