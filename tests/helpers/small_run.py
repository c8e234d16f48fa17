"""Settings of a training run of seconds: synthetic images, windows that wrap around, rows that leave and return."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig
from trainer.model import EncoderConfig

NUM_IMAGES = 300
NUM_STEPS = 40
EVERY = 13
"""Steps between checkpoints: never at the end of a window."""
ONLY_ROWS = EncoderConfig(name="none", in_channels=3, image_size=16)


def small_run(output: Path, **changes: Any) -> TrainConfig:
    """The settings of a small run in `output`, with `changes`: the base of every run in the trainer's tests."""
    settings: dict[str, Any] = {
        "dataset": "synthetic",
        "num_images": NUM_IMAGES,
        "output": output,
        "steps": NUM_STEPS,
        "batch_size": 16,
        "num_negatives": 64,
        "window_size": 96,
        "window_stride": 24,
        "learning_rate": 0.2,
        "dim": 16,
        "rows_per_block": 5,
        "prefetch_steps": 3,
        "log_every": 1,
        "checkpoint_every": EVERY,
        "encoder": EncoderConfig(in_channels=3, image_size=16, width=8, stem_stride=2, blocks=(1, 1)),
        "evaluate": False,
    }
    return TrainConfig().with_settings(**settings | changes)


class PowerLoss(Exception):
    """What ends a run without a last checkpoint."""


def power_loss_at(step: int) -> Callable[[int], None]:
    """An `on_step` that fails there."""

    def stop(done: int) -> None:
        if done == step:
            raise PowerLoss

    return stop


def losses(output: Path) -> list[float]:
    """The loss of each recorded step, which must be all steps from the first on."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(len(records)))
    return [record["loss"] for record in records]
