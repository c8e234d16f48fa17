"""Parts of a computation on the threads that torch may use."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """`work` of each item, in their order, without autograd; several items at a time, each by a single thread.

    Torch divides each operation among its threads, which then wait for each other: for milliseconds where another
    process has the core of one of them. Here they wait once. Results of several items do not depend on the number of
    threads. An interrupted caller leaves threads that still compute: let them write into memory of this call alone.
    """
    num_threads = torch.get_num_threads()
    if min(num_threads, len(items)) > 1:
        try:
            pool = _pool(os.getpid(), num_threads)
            results = [pool.submit(_without_autograd, work, item) for item in items]
        except RuntimeError:  # the interpreter is ending, or no thread can be started
            pass
        else:
            wait(results)
            return [result.result() for result in results]
    return [_without_autograd(work, item) for item in items]


@functools.cache
def _pool(process_id: int, num_threads: int) -> ThreadPoolExecutor:
    """Threads whose operations torch does not divide; they last, since the memory of what they compute does too.

    Args:
        process_id: of this process; one that was forked has none of its parent's threads.
    """
    pool, begun = ThreadPoolExecutor(num_threads, "weightserver-part"), threading.Barrier(num_threads + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # from now on torch asks for this thread's number only
        begun.wait()

    try:
        for _ in range(num_threads):
            pool.submit(begin)
        begun.wait()
    finally:
        begun.abort()
        torch.set_num_threads(num_threads)  # what threads set is also the number of threads that begin later
    return pool


def _without_autograd(work: Callable[[_Item], _Result], item: _Item) -> _Result:
    with torch.no_grad():
        return work(item)
