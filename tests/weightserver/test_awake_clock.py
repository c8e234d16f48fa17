"""A clock without the pauses of its process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from weightserver.server.awake_clock import AwakeClock


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass."""
    now = 100.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    return wait


def test_it_is_the_systems_clock_before_anyone_looks(wait: Callable[[float], None]) -> None:
    clock = AwakeClock()
    before = clock.now()
    wait(50)
    assert clock.now() - before == 50


def test_a_look_that_is_late_ends_a_pause(wait: Callable[[float], None]) -> None:
    clock = AwakeClock()
    clock.look(0.25)
    before = clock.now()
    wait(10)
    assert clock.now() - before == pytest.approx(0.5), "before the thread that looks has noticed it"
    clock.look(0.25)
    assert clock.now() - before == pytest.approx(0.5)
    wait(0.25)
    assert clock.now() - before == pytest.approx(0.75)


def test_it_does_not_stop_in_a_process_that_always_looks_late(wait: Callable[[float], None]) -> None:
    clock = AwakeClock()
    clock.look(0.25)
    before = clock.now()
    for _ in range(20):
        wait(1)
        clock.look(0.25)
    assert clock.now() - before == pytest.approx(10)


def test_it_never_goes_back(wait: Callable[[float], None]) -> None:
    clock = AwakeClock()
    times = [clock.now()]
    for seconds in (0.1, 0.3, 3.0, 0.0, 0.2, 0.6, 0.0):
        clock.look(0.25)
        times.append(clock.now())
        wait(seconds)
        times.append(clock.now())
    assert times == sorted(times)


def test_a_pause_within_a_reading_is_none_of_its_time(
    wait: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is stopped as the clock is read, and the thread that looks runs first afterwards."""
    clock = AwakeClock()
    clock.look(0.25)
    before, system = clock.now(), time.monotonic

    def stopped() -> float:
        monkeypatch.setattr(time, "monotonic", system)
        now = system()
        wait(10)
        clock.look(0.25)
        return now

    monkeypatch.setattr(time, "monotonic", stopped)
    assert clock.now() == before
