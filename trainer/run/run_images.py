"""Which images a run has: more may be added whenever it is resumed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from trainer.optimization import OptimizationConfig
from trainer.schedule import learning_rates
from weightserver.core.arrays import Float32Array


@dataclass(frozen=True)
class RunImages:
    """The images that a run has now, and their classes; neither settings nor data set record them."""

    num_images: int
    num_first: int
    """Number of images that the run started with, by which a warm-up in epochs is counted."""
    digests: tuple[str, ...] = ()
    """One for each range of images, in the order in which they were added; empty if the settings alone identify the
    images."""
    classes: str = ""
    """Digest of the class of each image (--labels); empty if each is its own class."""

    def resumed(self, range_sizes: Sequence[int], digests: Sequence[str], classes: str, *, extend: bool) -> RunImages:
        """The images when the run is resumed with images in ranges of these sizes and digests, and these classes.

        Raises:
            ValueError: other images or classes, or more images without `extend`.
        """
        self._check_classes(classes)
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
        return replace(self, num_images=now, digests=tuple(digests))

    def _check_classes(self, classes: str) -> None:
        if classes == self.classes:
            return
        if not self.classes:
            raise ValueError("the run has a class for each image: omit --labels, or start another run")
        if not classes:
            raise ValueError("the run has a class map: give its --labels")
        raise ValueError(
            "the class map is not that of the run, to which its rows belong: give the run's --labels, unchanged"
        )

    def _check_known(self, digests: Sequence[str]) -> None:
        if tuple(digests[: len(self.digests)]) != self.digests:
            raise ValueError(
                "the data set's images are not those of the run, to which its rows belong: "
                "give --data-dir with the run's images, packed as they were"
            )

    def learning_rates(self, config: OptimizationConfig) -> Float32Array:
        """The learning rates of a run of these images and this length, float32 [num_steps]; those of updates that a
        run made before it became longer may have been others.

        Images that are added later neither lengthen nor repeat a warm-up in epochs. A run shorter than its warm-up ends
        within it.
        """
        num_steps = config.num_steps(self.num_images)
        warmup_steps = config.warmup_steps(self.num_first, num_steps)
        return learning_rates(
            num_steps=max(num_steps, warmup_steps), base=config.learning_rate, warmup_steps=warmup_steps
        )[:num_steps]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunImages:
        content = json.loads(text)
        return cls(**content | {"digests": tuple(content["digests"])})
