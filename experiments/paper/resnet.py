"""Splits a ResNet into the stages that detection and segmentation build on."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import nn

from trainer.data.pixels import normalise
from trainer.model import EncoderConfig, TorchvisionEncoder

_CHECKED_SIDE = 64


class ResNetStages(NamedTuple):
    """Stages of a ResNet (He et al., 1512.03385, table 1), which share no weights with the encoder they come from."""

    backbone: nn.Sequential
    """Takes normalised images [B, 3, H, W]: conv1 with norm, activation and max pooling, conv2 and conv3, and conv4, of
    stride 16."""
    conv5: nn.Module
    """Stride 32."""
    conv4_channels: int
    """Channels of conv4's maps."""
    conv5_channels: int
    """Channels of conv5's maps."""


def resnet_stages(encoder: nn.Module, config: EncoderConfig) -> ResNetStages:
    """Copies the stages of a torchvision ResNet, or of a timm model with the same layout, in eval mode.

    Averages of conv5's maps are compared with the encoder's features, so that no layer is missed.

    Raises:
        ValueError: the encoder is not such a ResNet, or does not take colour images.
    """
    network = encoder.classifier if isinstance(encoder, TorchvisionEncoder) else encoder
    network = copy.deepcopy(network).eval()
    activation = "relu" if hasattr(network, "relu") else "act1"
    names = ["conv1", "bn1", activation, "maxpool", "layer1", "layer2", "layer3", "layer4"]
    refusal = f"encoder {config.name!r} is not a ResNet for colour images: give torchvision:resnet50 or one like it"
    if not all(isinstance(getattr(network, name, None), nn.Module) for name in names):
        raise ValueError(refusal)
    *stem, conv2, conv3, conv4, conv5 = (network.get_submodule(name) for name in names)
    backbone = nn.Sequential(nn.Sequential(*stem), conv2, conv3, conv4)
    if next(module for module in backbone.modules() if isinstance(module, nn.Conv2d)).in_channels != 3:
        raise ValueError(refusal)
    noise = torch.randint(0, 256, (2, 3, _CHECKED_SIDE, _CHECKED_SIDE), generator=torch.Generator().manual_seed(0))
    images = normalise(noise.byte().to(next(backbone.parameters()).device), config.pixels.channels(3))
    with torch.no_grad():
        conv4_maps = backbone(images)
        averages = conv5(conv4_maps).mean(dim=(2, 3))
        features = network(images)
    if averages.shape != features.shape or not torch.allclose(averages, features, rtol=1e-3, atol=1e-4):
        raise ValueError(refusal)
    return ResNetStages(backbone, conv5, conv4_maps.shape[1], features.shape[1])


def dilate(stage: nn.Module, dilation: int = 2) -> None:
    """Gives a stage's 3×3 convolutions this dilation and removes its stride, so that its maps keep their input's size.

    The first 3×3 convolution is dilated too, as in He et al. (1911.05722, appendix).

    Raises:
        ValueError: the stage has strided layers other than convolutions, such as the pooling of timm's resnet50d.
    """
    for name, module in stage.named_modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
            if module.kernel_size == (3, 3):
                module.dilation = module.padding = (dilation, dilation)
        elif not list(module.children()) and getattr(module, "stride", 1) not in (1, (1, 1)):
            kind = type(module).__name__
            raise ValueError(f"{name} ({kind}) has a stride, which dilation cannot replace: give a plain ResNet")
