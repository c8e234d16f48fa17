"""BatchNorm over the batches of all ranks, and statistics averaged over many batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.distributed import Ranks


class GatheredBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the batches of all ranks on the CPU, where nn.SyncBatchNorm does not run."""

    def forward(self, maps: Tensor) -> Tensor:
        if not self.training:
            return super().forward(maps)
        total = _sum_over_ranks(maps.new_tensor(maps.numel() / self.num_features))
        mean = _sum_over_ranks(maps.sum((0, 2, 3))) / total
        centred = maps - mean[:, None, None]
        variance = _sum_over_ranks(centred.square().sum((0, 2, 3))) / total
        self._update(mean, variance * (total / (total - 1)))
        scale = self.weight * (variance + self.eps).rsqrt()
        return centred * scale[:, None, None] + self.bias[:, None, None]

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        """Adds a batch to the running averages."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance, factor)


def _sum_over_ranks(values: Tensor) -> Tensor:
    """A sum through which gradients flow."""
    total: Tensor = functional.all_reduce(values)  # type: ignore[no-untyped-call]
    return total


def synchronised(network: nn.Module, ranks: Ranks) -> nn.Module:
    """The network with every BatchNorm over the batches of all ranks; parameters and buffers keep their names."""
    if ranks.world_size == 1:
        return network
    if ranks.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        return converted
    for module in list(network.modules()):
        for name, child in module.named_children():
            if type(child) is nn.BatchNorm2d:
                gathered = GatheredBatchNorm(child.num_features, eps=child.eps, momentum=child.momentum)
                gathered.load_state_dict(child.state_dict())
                setattr(module, name, gathered.to(child.weight.device))
    return network


@contextmanager
def averaged_statistics(network: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm statistics start again and become plain averages over all batches that are computed."""
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
