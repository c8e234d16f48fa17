"""Per-sample augmentation of a batch, on any device, from given uniform numbers.

A view is a pure function of (image, uniforms): nothing is drawn here, so a visit looks the same whatever batch, rank
or restart it falls into. The image mathematics is torch's and kornia's.

Images in memory are cropped on the device. Those that are decoded for each visit are cropped and flipped as they are
decoded (`trainer.data.decode`), by the same box, so that what follows is all there is to do on the device.

Differences from torchvision's transforms (SimCLR, MoCo v2), all deliberate: a crop that would stick out of the image is
cut to what the image has of a shape in range instead of being redrawn, and is not rounded to whole pixels; the colour
operations come in one fixed order; on the device crops are resampled bilinearly without antialiasing, which matters
only where a crop is larger than `image_size` (never at 28 px).
"""

import math
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from kornia.color import rgb_to_grayscale
from kornia.enhance import (
    adjust_brightness_accumulative,
    adjust_contrast_with_mean_subtraction,
    adjust_hue,
    adjust_saturation_with_gray_subtraction,
)
from kornia.filters import gaussian_blur2d
from torch import Tensor

from trainer.data.decode import Box, centre
from trainer.schedule import Float32Array


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig:
    """Random resized crop, flip, colour jitter, grey and blur; the defaults are the paper's: MoCo v2's, with
    SimCLR's stronger jitter."""

    strong: bool = True
    """Whether there are colour jitter, grey and blur beside crop and flip (no: the weak augmentation of Table 1)."""
    min_scale: float = 0.2
    """Smallest area of a crop, as a part of the image's."""
    max_scale: float = 1.0
    """Largest area of a crop, as a part of the image's."""
    max_aspect_ratio: float = 4 / 3
    """Crops are between this and its inverse, wide over high, log-uniformly."""
    flip_probability: float = 0.5
    """Probability of a horizontal flip."""
    jitter_probability: float = 0.8
    """Probability of the colour jitter as a whole."""
    brightness: float = 0.8
    """Brightness is multiplied by a factor within 1 ± this, not below 0."""
    contrast: float = 0.8
    """Distance from the image's mean grey is multiplied by a factor within 1 ± this, not below 0."""
    saturation: float = 0.8
    """Distance from grey is multiplied by a factor within 1 ± this, not below 0 (colour images only)."""
    hue: float = 0.2
    """Hue is turned by at most this part of the full circle, at most 0.5 (colour images only)."""
    grey_probability: float = 0.2
    """Probability of turning a colour image grey."""
    blur_probability: float = 0.5
    """Probability of a Gaussian blur."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Smallest and largest standard deviation of the blur, in pixels of the result."""

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.max_scale <= 1:
            raise ValueError(
                f"min_scale and max_scale are {self.min_scale} and {self.max_scale}: give 0 < min ≤ max ≤ 1"
            )
        if self.max_aspect_ratio < 1:
            raise ValueError(f"max_aspect_ratio is {self.max_aspect_ratio}: give a number of at least 1")
        for name in ("flip_probability", "jitter_probability", "grey_probability", "blur_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a probability, 0 to 1")
        for name in ("brightness", "contrast", "saturation"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more")
        if not 0 <= self.hue <= 0.5:
            raise ValueError(f"hue is {self.hue}: give 0 to 0.5")
        if not 0 < self.blur_sigma[0] <= self.blur_sigma[1]:
            raise ValueError(f"blur_sigma is {self.blur_sigma}: give 0 < smallest <= largest")


AUGMENTATIONS = {"strong": AugmentationConfig(), "weak": AugmentationConfig(strong=False)}
"""The paper's, and crop and flip alone, for comparison."""


class _Column(IntEnum):
    """Which column of the uniforms decides what; fixed, so that switching one operation off moves no other."""

    AREA = 0
    ASPECT = auto()
    TOP = auto()
    LEFT = auto()
    FLIP = auto()
    JITTER = auto()
    BRIGHTNESS = auto()
    CONTRAST = auto()
    SATURATION = auto()
    HUE = auto()
    GREY = auto()
    BLUR = auto()
    BLUR_SIGMA = auto()


def normalise(images: Tensor) -> Tensor:
    """Maps pixels uint8 [B, C, H, W] to float32 in -1..1: the one convention for what every encoder is given."""
    return images.float() / 127.5 - 1


class Augmentation:
    """Augments uint8 [B, C, H, W] to normalised float32 [B, C, image_size, image_size]; C is 1 or 3.

    `uniforms` is float32 [B, num_uniforms] in [0, 1), one row an image, on the images' device. Row i of the result
    depends on row i of the arguments alone. Stateless, hence thread-safe.
    """

    num_uniforms = len(_Column)

    def __init__(self, config: AugmentationConfig, image_size: int) -> None:
        self.config = config
        self.image_size = image_size

    @torch.no_grad()
    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor:
        return self._recolour(self._crop_and_flip(images.float() / 255, uniforms), uniforms)

    @torch.no_grad()
    def finish(self, crops: Tensor, uniforms: Tensor) -> Tensor:
        """The views of images that are cut to their `box` already: uint8 [B, C, image_size, image_size]."""
        return self._recolour(crops.float() / 255, uniforms)

    def box(self, uniforms: Float32Array, width: int, height: int) -> Box:
        """Crop and flip of an image of that size, in pixels; uniforms float32 [num_uniforms]."""
        x, y, half_width, half_height = (float(number) for number in self._boxes(np, uniforms, height, width))
        half_width, flipped = abs(half_width), half_width < 0
        left, top = max(0.0, 1 + x - half_width), max(0.0, 1 + y - half_height)
        right, bottom = min(2.0, 1 + x + half_width), min(2.0, 1 + y + half_height)
        return Box(left / 2 * width, top / 2 * height, right / 2 * width, bottom / 2 * height, flipped)

    def _boxes(self, xp: Any, uniforms: Any, height: int, width: int) -> tuple[Any, Any, Any, Any]:
        """Crops' centres, x and y, and half their sides, float32 [...], where the image spans -1..1 both ways.

        A width is negative where the crop is flipped. `xp` is the library, torch or NumPy, of uniforms
        [..., num_uniforms]: one image's numbers are torch's slowest.
        """
        smallest, largest, max_ratio = self.config.min_scale, self.config.max_scale, self.config.max_aspect_ratio
        area = smallest + (largest - smallest) * uniforms[..., _Column.AREA]
        log_ratio = (2 * uniforms[..., _Column.ASPECT] - 1) * math.log(max_ratio)
        # Sides as parts of the image's: the ratio is one of pixels, so a wide image's shape enters it.
        ratio = xp.exp(log_ratio) * (height / width)
        crop_width = xp.clip(xp.sqrt(area * ratio), None, min(1, max_ratio * height / width))
        crop_height = xp.clip(xp.sqrt(area / ratio), None, min(1, max_ratio * width / height))
        # A crop's centre may lie within 1 - side of the image's.
        x = (2 * uniforms[..., _Column.LEFT] - 1) * (1 - crop_width)
        y = (2 * uniforms[..., _Column.TOP] - 1) * (1 - crop_height)
        flipped = uniforms[..., _Column.FLIP] < self.config.flip_probability
        return x, y, xp.where(flipped, -crop_width, crop_width), crop_height

    def _crop_and_flip(self, images: Tensor, uniforms: Tensor) -> Tensor:
        x, y, width, height = self._boxes(torch, uniforms, *images.shape[-2:])
        zero = torch.zeros_like(x)
        theta = torch.stack([width, zero, x, zero, height, y], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(theta, [*images.shape[:2], self.image_size, self.image_size], align_corners=False)
        return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def _recolour(self, views: Tensor, uniforms: Tensor) -> Tensor:
        """Colour jitter, grey and blur of float32 in 0..1, and then -1..1."""
        config = self.config
        if not config.strong:
            return views * 2 - 1
        if config.jitter_probability > 0:
            chosen = uniforms[:, _Column.JITTER] < config.jitter_probability
            views = _where(chosen, self._jitter(views, uniforms), views)
        if config.grey_probability > 0 and views.shape[1] == 3:
            chosen = uniforms[:, _Column.GREY] < config.grey_probability
            views = _where(chosen, rgb_to_grayscale(views).expand_as(views), views)
        if config.blur_probability > 0:
            chosen = uniforms[:, _Column.BLUR] < config.blur_probability
            views = _where(chosen, self._blur(views, uniforms), views)
        return views * 2 - 1

    def _jitter(self, views: Tensor, uniforms: Tensor) -> Tensor:
        def factor(column: _Column, strength: float) -> Tensor:
            return (1 + strength * (2 * uniforms[:, column] - 1)).clamp(min=0)

        views = adjust_brightness_accumulative(views, factor(_Column.BRIGHTNESS, self.config.brightness))
        views = adjust_contrast_with_mean_subtraction(views, factor(_Column.CONTRAST, self.config.contrast))
        if views.shape[1] == 3:
            views = adjust_saturation_with_gray_subtraction(views, factor(_Column.SATURATION, self.config.saturation))
            turn = (2 * uniforms[:, _Column.HUE] - 1) * self.config.hue
            views = adjust_hue(views, turn * (2 * math.pi))
        return views

    def _blur(self, views: Tensor, uniforms: Tensor) -> Tensor:
        low, high = self.config.blur_sigma
        sigma = low + (high - low) * uniforms[:, _Column.BLUR_SIGMA]
        # SimCLR's kernel: a tenth of the side, odd, at least 3.
        kernel_size = max(3, self.image_size // 10 // 2 * 2 + 1)
        blurred: Tensor = gaussian_blur2d(views, kernel_size, torch.stack([sigma, sigma], dim=1))
        return blurred


class Unchanged(Augmentation):
    """Images as they are, or the centre squares of those that are decoded: to measure everything else."""

    def __init__(self, image_size: int) -> None:
        super().__init__(AugmentationConfig(strong=False), image_size)

    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor:
        return normalise(images)

    def finish(self, crops: Tensor, uniforms: Tensor) -> Tensor:
        return normalise(crops)

    def box(self, uniforms: Float32Array, width: int, height: int) -> Box:
        return centre(width, height)


def _where(chosen: Tensor, changed: Tensor, unchanged: Tensor) -> Tensor:
    """Per sample, `changed` where `chosen` (bool [B]) is true."""
    return torch.where(chosen[:, None, None, None], changed, unchanged)
