"""Parts of a computation on the threads that torch may use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """`work` of each item, in their order, without autograd; several items at a time, each by a single thread.

    Torch divides each operation among its threads, which then wait for each other: for milliseconds where another
    process has the core of one of them. Here they wait once. Results do not depend on the number of threads.
    """
    num_threads = torch.get_num_threads()
    if min(num_threads, len(items)) <= 1:
        return [_without_autograd(work, item) for item in items]
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda item: _without_autograd(work, item), items))
    finally:
        torch.set_num_threads(num_threads)  # what threads set is also the number of threads that begin later


def _without_autograd(work: Callable[[_Item], _Result], item: _Item) -> _Result:
    with torch.no_grad():
        return work(item)
