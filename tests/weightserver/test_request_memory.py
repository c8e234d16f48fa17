"""The memory of requests: its bound, its order, and that it is given back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers.fake_context import FakeContext
from tests.helpers.watching import wait_until
from weightserver.server.request_memory import RequestMemory

LIMIT = 100 << 20


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool


def reserve(memory: RequestMemory, pool: ThreadPoolExecutor, num_bytes: int, context: Any) -> Future[None]:
    """Begins a reservation that has to wait."""
    before = memory.num_waiting
    waiting = pool.submit(memory.reserve, num_bytes, context)
    wait_until(lambda: memory.num_waiting == before + 1 and context.num_callbacks == 1)
    return waiting


def test_first_come_first_served(pool: ThreadPoolExecutor) -> None:
    """A small request does not overtake a large one, which might else wait for ever."""
    memory = RequestMemory(LIMIT)
    callers: dict[str, Any] = {name: FakeContext() for name in ("first", "large", "gone", "small")}
    memory.reserve(60 << 20, callers["first"])
    waiting = {
        name: reserve(memory, pool, megabytes << 20, callers[name])
        for name, megabytes in {"large": 50, "gone": 100, "small": 1}.items()
    }
    assert not any(one.done() for one in waiting.values())
    callers["gone"].leave()
    with pytest.raises(CancelledError):
        waiting["gone"].result(60)
    assert not waiting["small"].done()
    callers["first"].leave()
    waiting["large"].result(60)
    waiting["small"].result(60)
    assert memory.used_bytes == 51 << 20
    callers["large"].leave()
    callers["small"].leave()
    assert memory.used_bytes == 0


def test_a_call_whose_caller_is_gone_holds_nothing() -> None:
    memory = RequestMemory(LIMIT)
    with pytest.raises(CancelledError):
        memory.reserve(1, FakeContext(is_gone=True))
    assert memory.used_bytes == 0


def test_callers_in_any_order_never_exceed_the_limit(pool: ThreadPoolExecutor) -> None:
    """Each reserves, and leaves while it waits or after it was served, until all have left."""
    memory, order = RequestMemory(LIMIT), random.Random(0)
    calls: list[tuple[Any, Future[None]]] = []
    for _ in range(300):
        if len(calls) < 15 and order.random() < 0.6:
            context: Any = FakeContext()
            calls.append((context, pool.submit(memory.reserve, order.randrange(LIMIT), context)))
            wait_until(lambda: context.num_callbacks == 1)  # noqa: B023
        elif calls:
            context, reserved = calls.pop(order.randrange(len(calls)))
            context.leave()
            assert isinstance(reserved.exception(60), CancelledError | None)
        assert 0 <= memory.used_bytes <= LIMIT
        assert memory.used_bytes or not memory.num_waiting
    for context, _ in calls:
        context.leave()
    assert memory.num_waiting == memory.used_bytes == 0
