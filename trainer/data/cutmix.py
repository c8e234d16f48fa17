"""CutMix (Yun et al., ICCV 2019, Algorithm 1): a rectangle of each view shows another image of the batch, and the loss
has the classes of both by their areas. Cao and Wu (arXiv 2201.10728) use it with a class for each image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from weightserver.core.arrays import Float32Array

NUM_UNIFORMS = 5
"""Of a batch: whether it is mixed, the area, the place in both directions, and the distance to the other image."""


@dataclass(frozen=True)
class CutMix:
    """How the views of a batch are mixed: the same rectangle of each view is that of the image `distance` places later
    among the rank's images, in a circle."""

    rectangle: tuple[slice, slice]
    """Rows and columns of pixels."""
    kept: float
    """Share of the area that still shows the image itself."""
    distance: int

    @classmethod
    def drawn(cls, probability: float, uniforms: Float32Array, views: Tensor) -> Self | None:
        """What mixes views (b, C, H, W) with this probability; None if they stay. uniforms: float32 [NUM_UNIFORMS].

        The rectangle's area before it is clipped to the view is uniform (α = 1, as in the paper); its middle too.
        """
        mixed, area, *middle, distance = map(float, uniforms)
        if mixed >= probability:
            return None
        sides = views.shape[-2:]
        places = [
            _clipped(int(place * side), int(side * math.sqrt(area)) // 2, side)
            for place, side in zip(middle, sides, strict=True)
        ]
        taken = math.prod((place.stop - place.start) / side for place, side in zip(places, sides, strict=True))
        return cls((places[0], places[1]), 1 - taken, min(1 + int(distance * (len(views) - 1)), len(views) - 1))

    def views(self, views: Tensor) -> Tensor:
        """The mixed views of (b, C, H, W)."""
        rows, columns = self.rectangle
        mixed = views.clone()
        mixed[..., rows, columns] = views[..., rows, columns].roll(-self.distance, dims=0)
        return mixed

    def loss(self, loss_of: Callable[[Tensor], Tensor], embeddings: Tensor) -> Tensor:
        """The mean over the mixed images of both classes' losses, weighted by area.

        `loss_of` is the mean loss of embeddings (b, D) with the batch's classes. Those of the other images are the
        same classes, of embeddings that are moved to where these images are.
        """
        of_others = loss_of(embeddings.roll(self.distance, dims=0))
        return self.kept * loss_of(embeddings) + (1 - self.kept) * of_others


def _clipped(middle: int, half: int, side: int) -> slice:
    return slice(max(0, middle - half), min(side, middle + half))
