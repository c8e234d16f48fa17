"""Normalisation of pixels for an encoder: minus their mean, divided by their standard deviation."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PixelScale(NamedTuple):
    """Mean and standard deviation of pixels in 0..1: one number for each channel, or one for all channels."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def factors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Factor and shift of pixels in 0..1: float32 [C, 1, 1] each, cached for each device."""
        return _factors(self, device)

    def channels(self, number: int) -> PixelScale:
        """Repeats a scale of grey images for each of `number` channels of a colour encoder."""
        mean, std = (numbers * number if len(numbers) == 1 else numbers for numbers in self)
        return PixelScale(mean, std)


MINUS_ONE_TO_ONE = PixelScale((0.5,), (0.5,))
"""Pixels from -1 to 1: the scale of encoders that were trained before it was a setting."""
IMAGENET = PixelScale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The scale of ImageNet-1K, as in torchvision and timm."""


def normalise(images: Tensor, pixels: PixelScale = MINUS_ONE_TO_ONE) -> Tensor:
    """Normalises pixels uint8 [B, C, H, W] to float32, on the scale that an encoder expects."""
    scale, shift = pixels.factors(images.device)
    return images.float() / 255 * scale + shift


def measured(images: Tensor) -> PixelScale:
    """Measures the scale of images uint8 [N, C, H, W], to four digits; the deviation is at least one level."""
    import torch

    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(images.shape[1]):
        counts = torch.zeros(256, dtype=torch.float64)
        for part in torch.split(images[:, channel], 10_000):  # counting takes eight bytes per pixel
            counts += torch.bincount(part.flatten(), minlength=256)
        share = counts / counts.sum()
        mean.append(float(share @ values))
        std.append(max(1 / 255, float((share @ (values - mean[-1]) ** 2).sqrt())))
    return PixelScale(tuple(round(number, 4) for number in mean), tuple(round(number, 4) for number in std))


@cache
def _factors(pixels: PixelScale, device: torch.device) -> tuple[Tensor, Tensor]:
    import torch

    scale = [1 / std for std in pixels.std]
    shift = [-mean / std for mean, std in zip(pixels.mean, pixels.std, strict=True)]
    return tuple(torch.tensor(numbers, device=device).view(-1, 1, 1) for numbers in (scale, shift))  # type: ignore[return-value]
