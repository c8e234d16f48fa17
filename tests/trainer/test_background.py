"""Computing ahead in a thread gives the same items as computing in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from weightserver.common.background import computed_ahead


def test_items_come_in_order_few_are_ahead_and_an_error_comes_in_its_turn() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            yield number
        raise ValueError("there is no other")

    with closing(computed_ahead(items(), ahead=3, name="ahead")) as computed:
        for number in range(50):
            assert next(computed) == number
            assert len(made) <= number + 1 + 4  # three that wait, and the one being made
        with pytest.raises(ValueError, match="no other"):
            next(computed)
    assert not any(thread.name.startswith("ahead") for thread in threading.enumerate())


def test_closing_ends_the_thread_before_the_items_do() -> None:
    def items() -> Iterator[int]:
        while True:
            time.sleep(0.001)
            yield 0

    with closing(computed_ahead(items(), ahead=2, name="endless")) as computed:
        next(computed)
    assert not any(thread.name.startswith("endless") for thread in threading.enumerate())
