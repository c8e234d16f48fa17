"""A fully convolutional network (Long et al., 1411.4038) of stride 16, on a ResNet whose conv5 is dilated."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.paper.resnet import ResNetStages, dilate

STRIDE = 16
_HEAD_CHANNELS = 256
_HEAD_DILATION = 6


class FCN(nn.Module):
    """Normalised images [B, 3, H, W] to logits [B, num_classes, h, w] at pixels 0, 16, 32, …, h = ⌈(H - 1) / 16⌉ + 1.

    Images are padded with their mean to 16·k + 1 pixels, so that the last logits lie at or after the last pixel.
    """

    def __init__(self, stages: ResNetStages, num_classes: int) -> None:
        super().__init__()
        dilate(stages.conv5)
        self.backbone = nn.Sequential(*stages.backbone, stages.conv5)
        self.head = nn.Sequential(
            *_dilated(stages.conv5_channels, _HEAD_CHANNELS),
            *_dilated(_HEAD_CHANNELS, _HEAD_CHANNELS),
            nn.Conv2d(_HEAD_CHANNELS, num_classes, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        down, right = (-(length - 1) % STRIDE for length in images.shape[-2:])
        logits: Tensor = self.head(self.backbone(F.pad(images, (0, right, 0, down))))
        return logits


def _dilated(in_channels: int, out_channels: int) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=_HEAD_DILATION, dilation=_HEAD_DILATION, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]


def upsample(logits: Tensor, height: int, width: int) -> Tensor:
    """Interpolates the logits of `FCN` bilinearly at each pixel: [B, C, h, w] to [B, C, height, width]."""
    size = [STRIDE * (length - 1) + 1 for length in logits.shape[-2:]]
    return F.interpolate(logits, size, mode="bilinear", align_corners=True)[..., :height, :width]
