"""Which images a run had from which step on: images may be added whenever it is resumed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.optimization import OptimizationConfig
from trainer.schedule import learning_rates
from weightserver.core.arrays import Float32Array


@dataclass(frozen=True)
class ImageHistory:
    """The ranges of images that a run had, and from which step on, and their classes; neither settings nor data set
    record it."""

    parts: tuple[tuple[int, int], ...]
    """(first step, number of images from that step on), ascending, the first at step 0."""
    digests: tuple[str, ...] = ()
    """One for each range of images, in the order in which they were added; empty if the settings alone identify the
    images."""
    classes: str = ""
    """Digest of the class of each image (--labels); empty if each image is its own class."""

    @property
    def num_images(self) -> int:
        return self.parts[-1][1]

    def extended(
        self, step: int, range_sizes: Sequence[int], digests: Sequence[str] = (), *, extend: bool
    ) -> ImageHistory:
        """The history of the run when it is resumed at `step` with images in ranges of these sizes and digests.

        Raises:
            ValueError: other images, or more without `extend`.
        """
        before, now = self.num_images, sum(range_sizes)
        if now == before:
            self._check_known(digests)
            return replace(self, digests=tuple(digests))  # a file of an older version has none
        if now < before:
            raise ValueError(f"the run has {before} images, the data set only {now}: give all images of the run")
        if before not in itertools.accumulate(range_sizes):
            raise ValueError(
                f"the run has {before} images, the data set {now}, and the images of the run may have other rows in "
                "it: add images by 'python -m trainer.data pack --extend', which leaves the old ones unchanged"
            )
        if not extend:
            raise ValueError(
                f"the run has {before} images, the data set {now}: give --extend to continue with all of them, or only "
                "the earlier images"
            )
        self._check_known(digests)
        parts = (*(part for part in self.parts if part[0] < step), (step, now))
        return replace(self, parts=parts, digests=tuple(digests))

    def check_classes(self, classes: str) -> None:
        """Raises ValueError unless the run had the class map of digest `classes`, to which its rows belong."""
        if classes == self.classes:
            return
        if not self.classes:
            raise ValueError("the run has a class for each image: omit --labels, or start another run")
        if not classes:
            raise ValueError("the run has classes that images share: give --labels with its class map")
        raise ValueError(
            "the class map is not that of the run, to which its rows belong: give --labels with the run's, unchanged"
        )

    def _check_known(self, digests: Sequence[str]) -> None:
        if tuple(digests[: len(self.digests)]) != self.digests:
            raise ValueError(
                "the data set's images are not those of the run, to which its rows belong: "
                "give --data-dir with the run's images, packed as they were"
            )

    def learning_rates(self, config: OptimizationConfig) -> Float32Array:
        """The learning rate of each update, float32 [num_steps]: in each part, that of a run of as many images.

        A warm-up in epochs counts the images that the run started with, so images that are added later neither
        lengthen nor repeat it. A run shorter than its warm-up ends within it.
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
        classes = {"classes": self.classes} if self.classes else {}
        return json.dumps({"parts": self.parts, "digests": self.digests, **classes})

    @classmethod
    def from_json(cls, text: str) -> ImageHistory:
        content = json.loads(text)
        if isinstance(content, list):  # written by an older version
            content = {"parts": content, "digests": []}
        parts = tuple((first_step, num_images) for first_step, num_images in content["parts"])
        return cls(parts, tuple(content["digests"]), content.get("classes", ""))
