"""Which images a run had from which step on: more may be added whenever it goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.config import TrainConfig
from trainer.schedule import learning_rates
from weightserver.core.arrays import Float32Array


@dataclass(frozen=True)
class ImageHistory:
    """What of a run's past its settings and its data set do not tell."""

    parts: tuple[tuple[int, int], ...]
    """(first step, number of images from it on), ascending, from step 0 on."""
    digests: tuple[str, ...] = ()
    """Of each range of images, in which they came; empty where nothing but the settings tells them from others."""

    @property
    def num_images(self) -> int:
        return self.parts[-1][1]

    def extended(
        self, step: int, range_sizes: Sequence[int], digests: Sequence[str] = (), *, extend: bool
    ) -> ImageHistory:
        """That of a run which goes on at `step` with images that came in ranges of these sizes and digests.

        Raises:
            ValueError: other images, or more without `extend`.
        """
        before, now = self.num_images, sum(range_sizes)
        if now == before:
            self._check_known(digests)
            return replace(self, digests=tuple(digests))  # which a file of an older version has not
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
        self._check_known(digests)
        return ImageHistory((*(part for part in self.parts if part[0] < step), (step, now)), tuple(digests))

    def _check_known(self, digests: Sequence[str]) -> None:
        if tuple(digests[: len(self.digests)]) != self.digests:
            raise ValueError(
                "the data set's images are not those of the run, to which its rows belong: "
                "give --data-dir with those, packed as they were"
            )

    def learning_rates(self, config: TrainConfig) -> Float32Array:
        """One for each update, float32: in each part those of a run of as many images.

        A warm-up in epochs counts those of the images that the run began with, so images that are added later neither
        lengthen it nor bring it back. A run that is shorter than its warm-up ends within it.
        """
        rates = np.zeros(0, np.float32)
        for first_step, num_images in self.parts:
            num_steps = config.num_steps(num_images)
            warmup_steps = config.warmup_steps(self.parts[0][1], num_steps)
            part = learning_rates(
                num_steps=max(num_steps, warmup_steps), base=config.base_learning_rate, warmup_steps=warmup_steps
            )[:num_steps]
            rates = np.concatenate([rates[:first_step], part[first_step:]])
        return rates

    def to_json(self) -> str:
        return json.dumps({"parts": self.parts, "digests": self.digests})

    @classmethod
    def from_json(cls, text: str) -> ImageHistory:
        content = json.loads(text)
        if isinstance(content, list):  # of an older version
            content = {"parts": content, "digests": []}
        parts = tuple((first_step, num_images) for first_step, num_images in content["parts"])
        return cls(parts, tuple(content["digests"]))
