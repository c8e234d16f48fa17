"""A fully convolutional network (Long et al., 1411.4038) of stride 16, on a ResNet whose conv5 is dilated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.evaluate.resnet import ResNetStages, dilate

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
        self.backbone = nn.Sequential(stages.stem, stages.conv2, stages.conv3, stages.conv4, stages.conv5)
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


def predict(logits: Tensor, height: int, width: int) -> Tensor:
    """The class of the largest upsampled logit, the first of equals: [C, h, w] to uint8 [height, width].

    One class is upsampled at a time, so that memory does not grow with their number: 14 bytes per pixel.
    """
    best = torch.full((height, width), -torch.inf, device=logits.device)
    classes = torch.zeros((height, width), dtype=torch.uint8, device=logits.device)
    for number, scores in enumerate(logits.float()):
        upsampled = upsample(scores[None, None], height, width)[0, 0]
        classes[upsampled > best] = number
        best = torch.maximum(best, upsampled)
    return classes


def synchronise_batch_norm(network: nn.Module, device: torch.device) -> nn.Module:
    """Makes BatchNorm use the statistics of the batches of all ranks: torch's SyncBatchNorm, or `_CpuSyncBatchNorm`.

    Raises:
        ValueError: the network has a BatchNorm of another class.
    """
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if other := next((norm for norm in norms if type(norm) is not nn.BatchNorm2d), None):
        raise ValueError(f"{type(other).__name__} of the encoder cannot be synchronised: evaluate on a single rank")
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        return converted
    for norm in norms:
        norm.__class__ = _CpuSyncBatchNorm  # the same state, computed otherwise
    return network


class _CpuSyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the batches of all ranks, for the CPU, which torch's SyncBatchNorm does not support."""

    def forward(self, maps: Tensor) -> Tensor:
        if not self.training:
            return super().forward(maps)
        values = maps.float()
        count = torch.tensor(float(values.numel() // values.shape[1]))
        dist.all_reduce(count)
        mean = _sum_over_ranks(values.sum(dim=(0, 2, 3))) / count
        centred = values - mean[:, None, None]
        variance = _sum_over_ranks(centred.square().sum(dim=(0, 2, 3))) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        factor = (variance + self.eps).rsqrt() * self.weight
        return (centred * factor[:, None, None] + self.bias[:, None, None]).to(maps.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def _sum_over_ranks(values: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(values)  # type: ignore[no-untyped-call]
    return total
