"""How many images a run had from which step on: more may be added whenever it goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.config import TrainConfig
from trainer.schedule import Float32Array, learning_rates


@dataclass(frozen=True)
class ImageHistory:
    """What of a run's past its settings and its data set do not tell."""

    parts: tuple[tuple[int, int], ...]
    """(first step, number of images from it on), ascending, from step 0 on."""

    @property
    def num_images(self) -> int:
        return self.parts[-1][1]

    def going_on(self, step: int, range_sizes: Sequence[int], *, extend: bool) -> ImageHistory:
        """That of a run which goes on at `step` with images that came in ranges of these sizes.

        Raises:
            ValueError: other images, or more without `extend`.
        """
        before, now = self.num_images, sum(range_sizes)
        if now == before:
            return self
        if now < before:
            raise ValueError(f"the run has {before} images, the data set only {now}: give it all that it had")
        if before not in itertools.accumulate(range_sizes):
            raise ValueError(
                f"the run has {before} images, the data set {now}, and others may have other rows by now: add images "
                "by 'python -m trainer.data pack --extend', which leaves the old ones what they are"
            )
        if not extend:
            raise ValueError(
                f"the run has {before} images, the data set {now}: give --extend to go on with all of them, or the "
                "images of before"
            )
        return ImageHistory((*(part for part in self.parts if part[0] < step), (step, now)))

    def learning_rates(self, config: TrainConfig) -> Float32Array:
        """One for each update, float32: in each part those of a run of as many images."""
        rates = np.zeros(0, np.float32)
        for first_step, num_images in self.parts:
            num_steps = config.num_steps(num_images)
            warmup_steps = round(config.warmup_fraction * num_steps)
            part = learning_rates(num_steps=num_steps, base=config.base_learning_rate, warmup_steps=warmup_steps)
            rates = np.concatenate([rates[:first_step], part[first_step:]])
        return rates

    def to_json(self) -> str:
        return json.dumps(self.parts)

    @classmethod
    def from_json(cls, text: str) -> ImageHistory:
        return cls(tuple((first_step, num_images) for first_step, num_images in json.loads(text)))
