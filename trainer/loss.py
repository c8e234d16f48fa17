"""The softmax over the active rows (Equation 1 of the paper), of cosines or products, on one rank or many."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.distributed import Ranks


def cosine_softmax_loss(
    features: Tensor, weight: Tensor, labels: Tensor, *, temperature: float, ranks: Ranks | None = None
) -> Tensor:
    """`softmax_loss` of logits cos(w_i, z)/τ: features and weight are L2-normalised here, in float32."""
    with torch.autocast(features.device.type, enabled=False):
        return softmax_loss(F.normalize(features), F.normalize(weight), labels, temperature=temperature, ranks=ranks)


def softmax_loss(
    features: Tensor, weight: Tensor, labels: Tensor, *, temperature: float = 1.0, ranks: Ranks | None = None
) -> Tensor:
    """Mean cross-entropy of logits w_i·z/τ over the whole batch, a scalar.

    Features (B, D) and weight (K, D) are float32; labels int64 (B,) index the rows of weight. Logits are float32 under
    autocast too.

    With `ranks`, features are those of this rank's share of the batch (`Ranks.share`) and weight is this rank's share
    of the K rows, of any size; labels are those of the whole batch, -1 where another rank has the row. All ranks call
    it, and its backward; each gets the same loss and exactly dLoss/dweight. Features get dLoss/dfeatures times
    world_size, so that an encoder whose gradients are averaged over ranks (DistributedDataParallel) trains like one.
    """
    with torch.autocast(features.device.type, enabled=False):
        if ranks is None or ranks.world_size == 1:
            logits = features @ weight.T / temperature  # (B, K)
            return F.cross_entropy(logits, labels)

        whole: Tensor = _WholeBatch.apply(features, len(labels), ranks)  # type: ignore[no-untyped-call]
        logits = whole @ weight.T / temperature  # (B, D) times (D, K of this rank)
        peak = logits.detach().amax(dim=1) if len(weight) else logits.new_full(labels.shape, -math.inf)  # (B,)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        logits = logits - peak[:, None]  # leaves the softmax as it is, and exp in range
        positive = -F.nll_loss(logits, labels, reduction="none", ignore_index=-1)  # (B,), 0 where another rank has it
        parts = torch.stack([logits.exp().sum(dim=1), positive])  # (2, B)
        total, positive = _SumOverRanks.apply(parts)  # type: ignore[no-untyped-call]
        loss: Tensor = (total.log() - positive).mean()
        return loss


class _WholeBatch(torch.autograd.Function):
    """Features (b, D) of each rank to those of the batch (B, D), which each rank then compares with its own rows."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, batch_size: int, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        share = ranks.share(batch_size)
        assert len(features) == share.stop - share.start, "features of this rank's share of the batch"
        whole = features.new_zeros(batch_size, features.shape[1])
        whole[share] = features
        dist.all_reduce(whole)  # exact: all ranks but one add zeros
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)  # (B, D), by way of this rank's rows
        dist.all_reduce(gradient)
        # The scale is for DistributedDataParallel, which divides by world_size what is a sum over the batch already.
        return gradient[ctx.ranks.share(len(gradient))] * ctx.ranks.world_size, None, None


class _SumOverRanks(torch.autograd.Function):
    """The sum, from which all ranks compute the same loss: each has the whole gradient of its own summand."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor) -> Tensor:
        total = summand.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
