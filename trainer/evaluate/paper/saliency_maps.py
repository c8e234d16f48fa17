"""Saliency maps of an encoder's last convolutional maps, and their similarity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.small_resnet import SmallResNet


def saliency_maps(activations: Tensor) -> Tensor:
    """L2 norm over channels divided by its sum over locations: [B, C, h, w] to float32 [B, h, w].

    A map whose activations are all zero is uniform.
    """
    return to_sum_one(activations.float().norm(dim=1))


def similarity(maps: Tensor, others: Tensor) -> Tensor:
    """Sum over locations of the smaller value: [n, h, w] and [n, h', w'] to [n].

    Maps of different sizes are compared at the larger height and width, interpolated bilinearly.
    """
    size = [max(lengths) for lengths in zip(maps.shape[1:], others.shape[1:], strict=True)]
    return torch.minimum(_resized(maps, size), _resized(others, size)).sum(dim=(1, 2))


def to_sum_one(maps: Tensor) -> Tensor:
    """Maps [n, h, w] divided by their sums over locations; a map of zeros becomes uniform."""
    sums = maps.sum(dim=(1, 2), keepdim=True)
    return torch.where(sums > 0, maps / sums, 1 / maps.shape[1:].numel())


def maps_and_features(encoder: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The maps [B, C, h, w] that an encoder averages to features, and its features [B, d], of normalised images.

    These are conv5's maps in a ResNet: the input of the adaptive average pooling that runs last.

    Raises:
        ValueError: the encoder has no such pooling, as a vision transformer, or pools maps of a single location.
    """
    pooled = list[Tensor]()
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0])) for module in _poolings(encoder)
    ]
    try:
        features: Tensor = encoder(images)
    finally:
        for hook in hooks:
            hook.remove()
    if not pooled or pooled[-1].ndim != 4:
        raise ValueError("does not average convolutional maps: give a convolutional one, such as torchvision:resnet50")
    if pooled[-1].shape[2:].numel() == 1:
        raise ValueError(f"has maps of a single location for {images.shape[-1]} px images: give larger images")
    return pooled[-1], features


def _poolings(encoder: nn.Module) -> list[nn.Module]:
    if isinstance(encoder, SmallResNet):
        return [encoder.pool]
    return [module for module in encoder.modules() if isinstance(module, nn.AdaptiveAvgPool2d)]


def _resized(maps: Tensor, size: list[int]) -> Tensor:
    if list(maps.shape[1:]) == size:
        return maps
    return to_sum_one(F.interpolate(maps[:, None], size, mode="bilinear", align_corners=False)[:, 0])
