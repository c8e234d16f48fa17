"""Files decoded by threads ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from trainer.cores import decode_threads

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def computed_ahead(
    function: Callable[[_Item], _Result], items: Iterable[_Item], num_ahead: int = 16
) -> Generator[_Result, None, None]:
    """function(item) of each item in order, computed by threads for up to `num_ahead` items in advance.

    An item's error is raised in its turn. Close the generator to end its threads.
    """
    ahead: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(decode_threads(), thread_name_prefix="decode") as pool:
        try:
            for item in items:
                ahead.append(pool.submit(function, item))
                if len(ahead) > num_ahead:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
