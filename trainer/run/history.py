"""Which images and which length a run had from which step on: both may grow whenever it is resumed."""

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
    """Digest of the class of each image (--labels, --image-order); empty if each is its own, in the order of a seed."""
    lengths: tuple[tuple[int, float, int | None], ...] = ()
    """(first step, --epochs and --steps from that step on), ascending, the first at step 0; empty for one length."""

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
            return self
        if now < before:
            raise ValueError(f"the run has {before} images, the data set only {now}: give all images of the run")
        if before not in itertools.accumulate(range_sizes):
            raise ValueError(
                f"the run has {before} images, the data set {now}, and the images of the run may have other rows in "
                "it: add images by 'pic pack --extend', which leaves the old ones unchanged"
            )
        if not extend:
            raise ValueError(
                f"the run has {before} images, the data set {now}: give --extend to continue with all of them, or only "
                "the earlier images"
            )
        self._check_known(digests)
        parts = (*(part for part in self.parts if part[0] < step), (step, now))
        return replace(self, parts=parts, digests=tuple(digests))

    def lengthened(self, step: int, before: OptimizationConfig, now: OptimizationConfig) -> ImageHistory:
        """The history of the run when it is resumed at `step` with the --epochs and --steps of `now`.

        `before` has the settings of the run, for histories without lengths.

        Raises:
            ValueError: the run would become shorter.
        """
        lengths = self.lengths or ((0, before.epochs, before.steps),)
        (_, epochs, steps), wanted = lengths[-1], (now.epochs, now.steps)
        if (epochs, steps) == wanted:
            return replace(self, lengths=lengths)
        had, has = (self._with_length(now, *length).num_steps(self.num_images) for length in ((epochs, steps), wanted))
        if has < had:
            given = f"--epochs {epochs:g}" if steps is None else f"--steps {steps}"
            raise ValueError(
                f"the run has a length of {had:,} updates, not {has:,}: it can become longer, not shorter: give {given}"
            )
        return replace(self, lengths=(*(length for length in lengths if length[0] < step), (step, *wanted)))

    @staticmethod
    def _with_length(config: OptimizationConfig, epochs: float, steps: int | None) -> OptimizationConfig:
        return replace(config, epochs=epochs, steps=steps)

    def check_classes(self, classes: str) -> None:
        """Raises ValueError unless the run had the class map of digest `classes`, to which its rows belong."""
        if classes == self.classes:
            return
        if not self.classes:
            raise ValueError(
                "the run has a class for each image, in the order of a seed: omit --labels and --image-order, or start "
                "another run"
            )
        if not classes:
            raise ValueError("the run has a class map or an order of its own: give its --labels or --image-order")
        raise ValueError(
            "the class map or order is not that of the run, to which its rows belong: give the run's --labels or "
            "--image-order, unchanged"
        )

    def _check_known(self, digests: Sequence[str]) -> None:
        if tuple(digests[: len(self.digests)]) != self.digests:
            raise ValueError(
                "the data set's images are not those of the run, to which its rows belong: "
                "give --data-dir with the run's images, packed as they were"
            )

    def learning_rates(self, config: OptimizationConfig) -> Float32Array:
        """The learning rate of each update, float32 [num_steps]: in each part, that of a run of its images and length.

        A warm-up in epochs counts the images that the run started with, so images that are added later neither
        lengthen nor repeat it. A run shorter than its warm-up ends within it.
        """
        lengths = self.lengths or ((0, config.epochs, config.steps),)
        starts = sorted({part[0] for part in self.parts} | {length[0] for length in lengths})
        rates = np.zeros(0, np.float32)
        for first_step in starts:
            num_images = [num_images for start, num_images in self.parts if start <= first_step][-1]
            _, epochs, steps = [length for length in lengths if length[0] <= first_step][-1]
            num_steps = self._with_length(config, epochs, steps).num_steps(num_images)
            warmup_steps = config.warmup_steps(self.parts[0][1], num_steps)
            part = learning_rates(
                num_steps=max(num_steps, warmup_steps), base=config.base_learning_rate, warmup_steps=warmup_steps
            )[:num_steps]
            rates = np.concatenate([rates[:first_step], part[first_step:]])
        return rates

    def to_json(self) -> str:
        more = {"classes": self.classes, "lengths": self.lengths}
        given = {name: value for name, value in more.items() if value}
        return json.dumps({"parts": self.parts, "digests": self.digests, **given})

    @classmethod
    def from_json(cls, text: str) -> ImageHistory:
        content = json.loads(text)
        parts = tuple((first_step, num_images) for first_step, num_images in content["parts"])
        lengths = tuple((first_step, epochs, steps) for first_step, epochs, steps in content.get("lengths", []))
        return cls(parts, tuple(content["digests"]), content.get("classes", ""), lengths)
