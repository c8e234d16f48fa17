"""Computes a step's inputs that need only the CPU in a thread, ahead of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

Item = TypeVar("Item")


class _End:
    """Follows the last item."""


_END: Final = _End()


def computed_ahead(items: Iterable[Item], *, ahead: int, name: str) -> Generator[Item, None, None]:
    """Yields the items in order; one thread of that name computes each up to `ahead` items before it is needed.

    An item's error is raised in its turn. Close the generator to end the thread.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
        upcoming = deque(pool.submit(_next, iterator) for _ in range(ahead + 1))
        try:
            while not isinstance(item := upcoming.popleft().result(), _End):
                upcoming.append(pool.submit(_next, iterator))
                yield item
        finally:
            pool.shutdown(cancel_futures=True)


def _next(iterator: Iterator[Item]) -> Item | _End:
    return next(iterator, _END)
