"""The files to which a run appends its records."""

import errno
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.run.record_files import events_of, lines_of
from weightserver.common.atomic_files import write_synced


def test_a_full_disk_is_one_line_with_the_path(tmp_path: Path) -> None:
    full = tmp_path / "metrics.jsonl"
    full.symlink_to("/dev/full")
    with ExitStack() as stack, pytest.raises(OSError, match=r"metrics.jsonl cannot be written \(No space left on devi"):
        lines_of(full, stack)({"step": 0})


def test_a_disk_that_is_found_full_when_a_file_is_synced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*step-…\.begun\.partial'"):
        write_synced(tmp_path / "step-….begun.partial", lambda path: None)


def test_events_that_a_run_repeats_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the clock was set back meanwhile."""
    now = time.time()
    for start_step, loss, began in ((0, 7.0, now), (2, 6.0, now - 1e6)):
        monkeypatch.setattr(time, "time", lambda began=began: began)
        with ExitStack() as stack:
            write = events_of(tmp_path / "tensorboard", start_step, stack)
            for step in range(start_step, 4):
                write({"step": step, "loss": loss, "rows": 3})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss", "rows"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 7), (1, 7), (2, 6), (3, 6)]
