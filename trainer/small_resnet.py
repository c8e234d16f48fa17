"""A ResNet for images of 28–64 px, the encoder "small" of the PIC weight server's trainer.

An export of such an encoder for timm has a copy of this file, which therefore needs torch alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _group_norm(width: int) -> nn.GroupNorm:
    """Eight groups, or fewer if eight do not divide the channels (Wu and He, 1803.08494)."""
    return nn.GroupNorm(math.gcd(width, 8), width)


_FULL_BLOCK = 16
"""Channels that oneDNN computes at a time: 16, or 8 without AVX-512."""
_Norm = Callable[[int], nn.BatchNorm2d | nn.GroupNorm]
_NORMS: dict[str, _Norm] = {"batch": nn.BatchNorm2d, "group": _group_norm}


class SmallResNet(nn.Module):
    """ResNet of basic blocks for 28–64 px images: a 3×3 stem without max pooling, stages, a grid of averages.

    The last norm of each block starts at 0, so that a block starts as its shortcut (Goyal et al., 1706.02677).
    """

    def __init__(
        self,
        *,
        in_chans: int,
        width: int = 32,
        blocks: Sequence[int] = (1, 1, 1),
        stem_stride: int = 1,
        pool_size: int = 1,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        make_norm = _NORMS[norm]
        layers: list[nn.Module] = [
            nn.Conv2d(in_chans, width, 3, stem_stride, padding=1, bias=False),
            make_norm(width),
            nn.ReLU(inplace=True),
        ]
        in_width = width
        for stage, num_blocks in enumerate(blocks):
            for block in range(num_blocks):
                out_width = width * 2**stage
                layers.append(BasicBlock(in_width, out_width, 2 if stage > 0 and block == 0 else 1, make_norm))
                in_width = out_width
        self.stages = nn.Sequential(*layers)
        self.pool = GridOfAverages(pool_size)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            if isinstance(module, BasicBlock):
                nn.init.zeros_(module.norm2.weight)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stages(images)  # (B, width·2^(stages-1), side, side)
        pooled: Tensor = self.pool(maps)
        return pooled.flatten(1)


class GridOfAverages(nn.Module):
    """nn.AdaptiveAvgPool2d with the same bits; its backward also works with deterministic algorithms on CUDA."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, maps: Tensor) -> Tensor:
        if self.size > 1 and torch.are_deterministic_algorithms_enabled():
            averages: Tensor = _DeterministicAverages.apply(maps, self.size)  # type: ignore[no-untyped-call]
            return averages
        return F.adaptive_avg_pool2d(maps, self.size)


class _DeterministicAverages(torch.autograd.Function):
    """F.adaptive_avg_pool2d with a backward that adds the parts' gradients in order, as on the CPU."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(maps)
        return F.adaptive_avg_pool2d(maps, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (maps,) = ctx.saved_tensors  # (B, C, height, width)
        size, result = gradients[0].shape[-1], torch.zeros_like(maps)
        height, width = maps.shape[-2:]
        for row, column in itertools.product(range(size), repeat=2):
            top, bottom = row * height // size, -(-(row + 1) * height // size)
            left, right = column * width // size, -(-(column + 1) * width // size)
            share = gradients[0][:, :, row, column] / (bottom - top) / (right - left)  # (B, C)
            result[:, :, top:bottom, left:right] += share[:, :, None, None]
        return result, None


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al., 1512.03385)."""

    def __init__(self, in_width: int, out_width: int, stride: int, norm: _Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, out_width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(out_width)
        self.conv2 = nn.Conv2d(out_width, out_width, 3, padding=1, bias=False)
        self.norm2 = norm(out_width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_width != out_width:
            convolution = nn.Conv2d if in_width >= _FULL_BLOCK else _StridedPointwise
            self.shortcut = nn.Sequential(convolution(in_width, out_width, 1, stride, bias=False), norm(out_width))

    def forward(self, maps: Tensor) -> Tensor:
        out = torch.relu_(self.norm1(self.conv1(maps)))
        out = self.norm2(self.conv2(out))
        return torch.relu_(out + self.shortcut(maps))


class _StridedPointwise(nn.Conv2d):
    """A 1×1 convolution, for few channels.

    It takes each stride-th pixel by itself: where oneDNN does so, the gradient of the weights reads and writes beyond
    its buffer if pixels have fewer channels than a block and lie in the order channels_last, which is wrong, or a
    crash, on processors without AVX-512 (oneDNN's issue 6035).
    """

    def forward(self, maps: Tensor) -> Tensor:
        down, across = self.stride
        return F.conv2d(maps[:, :, ::down, ::across], self.weight)
