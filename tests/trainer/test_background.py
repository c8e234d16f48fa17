"""Computing ahead in a thread gives the same items as computing in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from weightserver.common.background import computed_ahead


def test_items_come_in_order_and_few_are_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            yield number

    with closing(computed_ahead(items(), ahead=3, name="ahead")) as computed:
        for number, item in enumerate(computed):
            assert item == number
            assert len(made) <= number + 1 + 4  # three that wait, and the one being made
    assert len(made) == 50


def test_an_error_comes_in_its_turn_and_the_thread_ends() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("the third cannot be had")

    with closing(computed_ahead(items(), ahead=5, name="failing-ahead")) as computed:
        assert [next(computed), next(computed)] == [1, 2]
        with pytest.raises(ValueError, match="the third"):
            next(computed)
    assert not any(thread.name.startswith("failing-ahead") for thread in threading.enumerate())


def test_closing_ends_the_thread_before_the_items_do() -> None:
    def items() -> Iterator[int]:
        while True:
            time.sleep(0.001)
            yield 0

    with closing(computed_ahead(items(), ahead=2, name="endless")) as computed:
        next(computed)
    assert not any(thread.name.startswith("endless") for thread in threading.enumerate())
