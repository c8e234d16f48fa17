"""A run that kills itself with -9 at one point of its second checkpoint:
python -m tests.helpers.dying_run OUTPUT ROWS POINT."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

import trainer.run.checkpoint
from tests.helpers.small_run import small_run
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.run.checkpoint import Checkpoints
from weightserver import WeightClient
from weightserver.client.connection import ShardConnection

NUM_SHARDS = TrainConfig().servers.num_shards
Patch = tuple[Any, str, Callable[..., Callable[..., Any]]]


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")


def before(number: int, *, after: bool = False, of: str = "") -> Callable[..., Callable[..., Any]]:
    """Dies instead of the `number`-th call, or after it; `of` counts calls of a shard's method alone, one by one."""

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        calls: list[None] = []
        one_by_one = threading.RLock()

        def call(*arguments: Any, **options: Any) -> Any:
            if of and arguments[1] != of:
                return original(*arguments, **options)
            with one_by_one:
                calls.append(None)
                dies = len(calls) == number
                result = None if dies and not after else original(*arguments, **options)
                return die() if dies else result

        return call

    return patched


after = partial(before, after=True)


def between_shards(method: str, number: int) -> Callable[..., Callable[..., Any]]:
    """Dies after the first shard has answered the `number`-th call of `method`, before the second gets it."""
    return before(NUM_SHARDS * number, of=method)


# The run keeps the newest checkpoint alone: its second checkpoint (steps 0 and 13) releases one.
POINTS: dict[str, Patch] = {
    "before the flush": (Checkpoints, "save", before(2)),
    "after the flush, before the shards": (WeightClient, "checkpoint", before(2)),
    "between two shards": (ShardConnection, "call", between_shards("Checkpoint", 2)),
    "after the shards, before the file": (Checkpoints, "_write", before(2)),
    "in the first file": (trainer.run.checkpoint, "save_file", before(1)),
    "in the file": (trainer.run.checkpoint, "save_file", after(2)),
    "after the file, before the old one goes": (Checkpoints, "_forget_old", before(2)),
    "after the old file went, before the release": (WeightClient, "release", before(1)),
    "between two shards of the release": (ShardConnection, "call", between_shards("Release", 1)),
    "after everything": (Checkpoints, "save", after(2)),
}


if __name__ == "__main__":
    output, rows, point = sys.argv[1:]
    owner, name, patch = POINTS[point]
    setattr(owner, name, patch(getattr(owner, name)))
    torch.set_num_threads(1)
    train(small_run(Path(output), rows=rows, keep_checkpoints=1))
