"""Batch normalisation over the batches of all ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormOfRanks(_BatchNorm):
    """BatchNorm of inputs [B, C, ...] whose batch is that of all ranks, if there are several; at least in float32."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accepts any number of axes."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [-1] + [1] * (input.ndim - 2)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        count = values.new_tensor(float(values.numel() // values.shape[1]))
        dist.all_reduce(count)
        mean = _summed(values.sum(axes)) / count  # (C,)
        centred = values - mean.view(shape)
        variance = _summed(centred.square().sum(axes)) / count  # (C,)
        self._track(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        normalised = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        return normalised.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance, factor)


class _SumOfRanks(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _SumOfRanks.forward(_, gradient)


def _summed(values: Tensor) -> Tensor:
    total: Tensor = _SumOfRanks.apply(values)  # type: ignore[no-untyped-call]
    return total
