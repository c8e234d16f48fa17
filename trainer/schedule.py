"""A run's sampling settings, its learning rates, and the random numbers of visits and steps: pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainer.settings import SettingError, Settings, check_at_least, named_by_flags, resumable
from weightserver.core.arrays import Float32Array, Float64Array, Int64Array
from weightserver.core.splitmix import derive_seed, splitmix64

if TYPE_CHECKING:
    from weightserver.torch import VisitSchedule

_AUGMENTATION, _FORWARD, _FURTHER = 3, 5, 6
"""Purposes of a seed's numbers (`derive_seed`); 1, 2, 4 and 7 are those of `weightserver.torch`."""
_COLUMNS = 13
"""Numbers of a visit in each of its streams: fixed at the number that the first version had."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Settings):
    """The order of images, the window that slides over it, and the seeds."""

    labels: str | None = resumable(None)
    """Classes that many images share, instead of one for each image. classes: the data set's labels. Otherwise a file
    with the class of each image, 0 to C−1: .npy of integers, or text of one integer a line. The window then slides
    over neighbouring classes."""
    window_size: int = 1024
    """W, images in the sliding window."""
    window_stride: int = 128
    """S, images by which the window moves after all its images were visited. Epoch order is S = W = N."""
    seed: int = 0
    """Seed of the encoder, the initial rows, the order within windows and the augmentations."""
    order_seed: int = 0
    """Seed of the order of the images, over which the window slides."""

    def check(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise SettingError(f"--seed must lie in 0..2^64-1, got {self.seed}", "seed")
        if self.labels == "":
            raise SettingError("--labels is empty: give 'classes', or a file", "labels")
        check_at_least(self, 1, "window_size", "window_stride")

    def visit_schedule(self, num_images: int) -> VisitSchedule:
        """The stream of visits to `num_images` images. Raises SettingError if the window does not fit."""
        from weightserver.torch import VisitSchedule

        with named_by_flags():
            return VisitSchedule(
                num_rows=num_images, window_size=self.window_size, window_stride=self.window_stride, seed=self.seed
            )


def visit_uniforms(seed: int, visits: Int64Array, count: int) -> Float32Array:
    """`count` uniform numbers in [0, 1) for each visit (int64 [...]): float32 [..., count].

    A number is a function of (seed, visit, column), independent of `count`: every 13 columns form their own stream, so
    that a version that needs more columns does not change the others.
    """
    bits = []
    for stream, first in enumerate(range(0, count, _COLUMNS)):
        key = derive_seed(seed, _AUGMENTATION) if stream == 0 else derive_seed(derive_seed(seed, _FURTHER), stream)
        counter: npt.NDArray[np.uint64] = np.add.outer(
            visits.astype(np.uint64) * np.uint64(_COLUMNS), np.arange(min(_COLUMNS, count - first), dtype=np.uint64)
        )
        bits.append(splitmix64(key, counter) >> np.uint64(40))
    return np.concatenate(bits, axis=-1).astype(np.float32) * np.float32(2.0**-24)


def forward_seed(seed: int, step: int, rank: int) -> int:
    """The seed of a rank's generators in a step, in 0..2⁶⁴−1, for encoders that draw random numbers (dropout)."""
    return derive_seed(derive_seed(derive_seed(seed, _FORWARD), step), rank)


def learning_rates(*, num_steps: int, base: float, warmup_steps: int) -> Float32Array:
    """Linear warm-up from a hundredth of base to base, then a cosine to 0, step by step: float32 [num_steps].

    The bits are the same on every machine: rows are corrected by them wherever a run is resumed.
    """
    if not 0 <= warmup_steps <= num_steps:
        raise ValueError(f"the warm-up must take 0..{num_steps} steps, the length of the run, got {warmup_steps}")
    step = np.arange(num_steps, dtype=np.float64)
    warmup = 0.01 + 0.99 * step / max(1, warmup_steps)
    left = (num_steps - step[warmup_steps:]) / max(1, num_steps - warmup_steps)
    cosine = _sine(math.pi / 2 * left) ** 2  # (1 + cos α)/2 = sin² ((π − α)/2)
    return (base * np.concatenate([warmup[:warmup_steps], cosine])).astype(np.float32)


def _sine(angle: Float64Array) -> Float64Array:
    """sin of 0 ≤ angle ≤ π/2 by Taylor's series: the platforms' own functions differ in the last bit."""
    total, square = np.ones_like(angle), angle * angle
    for k in range(26, 0, -2):
        total = 1 - square * total / (k * (k + 1))
    return angle * total
