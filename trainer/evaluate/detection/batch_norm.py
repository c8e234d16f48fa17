"""BatchNorm statistics averaged over many batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


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
