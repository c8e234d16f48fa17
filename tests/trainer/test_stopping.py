"""Signals that end a run after its step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from trainer import stopping
from trainer.stopping import stop_signals


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Presses Ctrl-C after so many more seconds."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    now = 0.0

    def interrupt_after(seconds: float) -> None:
        nonlocal now
        now += seconds
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
    return interrupt_after


def test_a_second_signal_ends_the_process_as_usual(interrupt_after: Callable[[float], None]) -> None:
    with stop_signals() as received:
        interrupt_after(0.0)
        interrupt_after(0.5)
        with pytest.raises(KeyboardInterrupt):
            interrupt_after(1.0)
    assert received == [signal.SIGINT]


@pytest.mark.parametrize("late", [0.1, 20.0])
def test_the_signal_that_torchrun_repeats_counts_as_one(
    late: float, interrupt_after: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late: the checkpoint would be lost."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with stop_signals() as received:
        interrupt_after(0.0)
        interrupt_after(late)
        with pytest.raises(KeyboardInterrupt):
            interrupt_after(2.0)
    assert received == [signal.SIGINT]
