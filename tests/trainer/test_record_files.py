"""The files to which a run appends its records."""

import errno
import os
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from trainer.run.recorder import lines_of
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
