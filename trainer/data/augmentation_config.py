"""Settings of the random augmentation of images; `trainer.data.augment` applies it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weightserver.core.errors import ArgumentError

_PAPERS_SIZE = 224
"""Side of the views for which the default blur is."""


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig:
    """Random resized crop, flip, colour jitter, grey and blur; the defaults are the paper's: MoCo v2's, with
    SimCLR's stronger jitter."""

    strong: bool = True
    """Whether to apply colour jitter, grey and blur as well as crop and flip (no: the weak augmentation of Table 1)."""
    min_scale: float = 0.2
    """Smallest area of a crop, as a fraction of the image."""
    max_scale: float = 1.0
    """Largest area of a crop, as a fraction of the image."""
    max_aspect_ratio: float = 4 / 3
    """Largest ratio of width to height, and inverse of the smallest; the ratio is log-uniform between them."""
    flip_probability: float = 0.5
    """Probability of a horizontal flip."""
    jitter_probability: float = 0.8
    """Probability of the colour jitter as a whole."""
    brightness: float = 0.8
    """Brightness is multiplied by a factor within 1 ± this, at least 0."""
    contrast: float = 0.8
    """The difference to the image's mean grey is multiplied by a factor within 1 ± this, at least 0."""
    saturation: float = 0.8
    """The difference to grey is multiplied by a factor within 1 ± this, at least 0 (colour images only)."""
    hue: float = 0.2
    """The hue is rotated by at most this fraction of the full circle, at most 0.5 (colour images only)."""
    grey_probability: float = 0.2
    """Probability of converting a colour image to grey."""
    blur_probability: float = 0.5
    """Probability of a Gaussian blur."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur, in pixels of the result."""

    def check(self) -> None:
        """Raises ArgumentError for a value out of range."""
        if not 0 < self.min_scale <= self.max_scale <= 1:
            raise ArgumentError(
                "min_scale", f"is {self.min_scale} and the largest {self.max_scale}: give 0 < smallest <= largest <= 1"
            )
        if not 1 <= self.max_aspect_ratio <= 1_000:
            raise ArgumentError("max_aspect_ratio", f"is {self.max_aspect_ratio}: give a number of 1 to 1000")
        for name in ("flip_probability", "jitter_probability", "grey_probability", "blur_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(name, f"is {getattr(self, name)}: give a probability, 0 to 1")
        for name in ("brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ArgumentError(name, f"is {getattr(self, name)}: give 0 or more, and a finite number")
        if not 0 <= self.hue <= 0.5:
            raise ArgumentError("hue", f"is {self.hue}: give 0 to 0.5")
        if not 0 < self.blur_sigma[0] <= self.blur_sigma[1] < math.inf:
            raise ArgumentError("blur_sigma", f"is {self.blur_sigma}: give 0 < smallest <= largest, and finite numbers")

    def at_size(self, image_size: int) -> AugmentationConfig:
        """Scales the blur from views of 224 pixels to those of `image_size` pixels."""
        smallest, largest = (float(f"{sigma * image_size / _PAPERS_SIZE:.2g}") for sigma in self.blur_sigma)
        return replace(self, blur_sigma=(smallest, largest))
