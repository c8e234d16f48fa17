"""Signals that end a run after its step."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.small_run import NUM_IMAGES, small_run
from trainer import stopping
from trainer.run.recorder import Recorder
from trainer.stopping import Interrupted, exit_on_error, stop_signals
from weightserver.torch import Ranks


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


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_a_signal_ends_a_run_as_usual_if_it_has_ended_who_reads_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: str
) -> None:
    """As Ctrl-C does after `2>&1 | tee`: the checkpoint would be lost."""
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(os, "_exit", sys.exit)
    reader, writer = os.pipe()
    os.close(reader)
    unread = os.fdopen(writer, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", unread)
    with ExitStack() as stack:
        recorder = Recorder(small_run(tmp_path), NUM_IMAGES, Ranks(), stack)
        with stop_signals(recorder.note_signal) as received:
            signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, exit_on_error("trainer"):
        raise Interrupted(received[0], "interrupted after 21 steps")
    assert ended.value.code == 128 + signal.SIGTERM
    with suppress(BrokenPipeError):
        unread.close()
