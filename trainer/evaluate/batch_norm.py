"""Batch normalisation over the batches of all ranks, on any device."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.distributed import Ranks


def synchronised(network: nn.Module, ranks: Ranks) -> nn.Module:
    """The network with BatchNorms whose statistics are those of all ranks' images, so that ranks change no result.

    On GPUs these are torch's SyncBatchNorm, which has no form for CPUs.
    """
    if ranks.world_size == 1:
        return network
    if ranks.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        return converted
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm):
            parent, _, leaf = name.rpartition(".")
            if not name:
                return _OverRanks(module)
            setattr(network.get_submodule(parent), leaf, _OverRanks(module))
    return network


class _OverRanks(_BatchNorm):
    """A BatchNorm that sums over ranks; it shares the parameters and buffers of `module`."""

    def __init__(self, module: _BatchNorm) -> None:
        super().__init__(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        self.__dict__.update(
            {name: dict(value) if isinstance(value, dict) else value for name, value in module.__dict__.items()}
        )

    def _check_input_dim(self, input: Tensor) -> None:
        """Inputs of any number of axes [B, C, ...] are normalised."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        values = input.float()
        count = torch.tensor([float(values.numel() // values.shape[1])])
        dist.all_reduce(count)
        total = count.to(values.device)
        mean = _summed(values.sum(axes)) / total  # (C,)
        centred = values - mean.view(shape)
        variance = _summed(centred.square().sum(axes)) / total  # (C,)
        self._track(mean.detach(), variance.detach() * total / (total - 1).clamp(min=1))
        normalised: Tensor = centred * (variance + self.eps).rsqrt().view(shape)
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


def _summed(values: Tensor) -> Tensor:
    """The sum over ranks; gradients are summed too."""
    total: Tensor = collective.all_reduce(values)  # type: ignore[no-untyped-call]
    return total
