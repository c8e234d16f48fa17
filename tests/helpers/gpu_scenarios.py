"""Actions of ranks in the tests of GPUs; `tests.helpers.gpus.Gpus.run` starts them on real GPUs and pretended ones."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.small_run import small_run
from trainer.loop import train


def train_small(output: Path, settings: dict[str, Any]) -> None:
    train(small_run(output, **settings))


def train_until_killed(output: Path, settings: dict[str, Any], step: int) -> None:
    """Kills every rank before that step."""

    def die(at: int) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(small_run(output, **settings), on_step=die)


def train_without_waiting(output: Path, settings: dict[str, Any], first: int, stop: int) -> None:
    """Raises an error if the program waits for its GPU in steps `first` to `stop` - 1."""

    def watch(step: int) -> None:
        if step == first:
            torch.cuda.set_sync_debug_mode("error")
            _assert_waits_raise()
        if step == stop:
            torch.cuda.set_sync_debug_mode("default")

    train(small_run(output, **settings), on_step=watch)


def _assert_waits_raise() -> None:
    one = torch.ones(1, device=torch.device("cuda", torch.cuda.current_device()))
    with pytest.raises(RuntimeError, match="synchronizing"):
        one.item()


def train_and_tell_gpus(output: Path, settings: dict[str, Any], told: Path) -> None:
    """Writes told-RANK: the numbers of the GPUs on which this process has a context."""
    train(small_run(output, **settings))
    # A context alone, without a tensor, takes half a GB.
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: torch.cuda.max_memory_reserved(index) > 0)
    used = [index for index in range(torch.cuda.device_count()) if has_context(index)]
    Path(f"{told}-{os.environ['RANK']}").write_text(json.dumps(used))
