"""A run that kills itself with -9 at one point of its second checkpoint:
python -m tests.helpers.dying_run OUTPUT ROWS POINT."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
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


def _before(number: int) -> Callable[..., Callable[..., Any]]:
    """Dies instead of the `number`-th call."""

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        calls: list[None] = []

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(None)
            return die() if len(calls) == number else original(*arguments, **options)

        return call

    return patched


def _after(number: int) -> Callable[..., Callable[..., Any]]:
    """Dies after the `number`-th call."""

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        calls: list[None] = []

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(None)
            result = original(*arguments, **options)
            return die() if len(calls) == number else result

        return call

    return patched


def _between_shards(method: str, number: int) -> Callable[..., Callable[..., Any]]:
    """Dies after the first shard has answered the `number`-th call of `method`, before the second gets it."""

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        calls: list[None] = []
        one_by_one = threading.Lock()

        def call(self: ShardConnection, name: str, request: Any, **options: Any) -> Any:
            if name != method:
                return original(self, name, request, **options)
            with one_by_one:
                calls.append(None)
                return die() if len(calls) == NUM_SHARDS * number else original(self, name, request, **options)

        return call

    return patched


# The run keeps the newest checkpoint alone: its second checkpoint (steps 0 and 13) releases one.
POINTS: dict[str, Patch] = {
    "before the flush": (Checkpoints, "save", _before(2)),
    "after the flush, before the shards": (WeightClient, "checkpoint", _before(2)),
    "between two shards": (ShardConnection, "call", _between_shards("Checkpoint", 2)),
    "after the shards, before the file": (Checkpoints, "_write", _before(2)),
    "in the file": (trainer.run.checkpoint, "save_file", _after(2)),
    "after the file, before the old one goes": (Checkpoints, "_forget_old", _before(2)),
    "after the old file went, before the release": (WeightClient, "release", _before(1)),
    "between two shards of the release": (ShardConnection, "call", _between_shards("Release", 1)),
    "after everything": (Checkpoints, "save", _after(2)),
}


if __name__ == "__main__":
    output, rows, point = sys.argv[1:]
    owner, name, patch = POINTS[point]
    setattr(owner, name, patch(getattr(owner, name)))
    torch.set_num_threads(1)
    train(small_run(Path(output), rows=rows, keep_checkpoints=1))
