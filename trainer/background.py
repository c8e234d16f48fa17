"""What a step needs of the processor alone is computed by a thread ahead of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

Item = TypeVar("Item")


class _End:
    """After the last item."""


_END: Final = _End()


def computed_ahead(items: Iterable[Item], *, ahead: int, name: str) -> Generator[Item, None, None]:
    """The items in their order, each computed up to `ahead` items before it is asked for, by one thread of that name.

    What computing an item raises is raised in the item's turn. Close it to end the thread.
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
