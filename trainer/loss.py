"""The cosine softmax over the active rows (Equation 1 of the paper with cosine logits), on one rank or many."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.distributed import Ranks


def cosine_softmax_loss(
    features: Tensor, weight: Tensor, labels: Tensor, *, temperature: float, ranks: Ranks | None = None
) -> Tensor:
    """Mean cross-entropy of logits cos(w_i, z)/τ over the whole batch, a scalar; chance is log K.

    Features (B, D) and weight (K, D) are L2-normalised here, both float32; labels int64 (B,) index the rows of weight.
    Logits are float32 under autocast too.

    With `ranks`, features are those of this rank's share of the batch (`Ranks.share`) and weight is this rank's share
    of the K rows, of any size; labels are those of the whole batch, -1 where another rank has the row. All ranks call
    it, and its backward; each gets the same loss and exactly dLoss/dweight. Features get dLoss/dfeatures times
    world_size, so that an encoder whose gradients are averaged over ranks (DistributedDataParallel) trains like one.
    """
    with torch.autocast(features.device.type, enabled=False):
        if ranks is None or ranks.world_size == 1:
            logits = F.normalize(features) @ F.normalize(weight).T / temperature  # (B, K)
            return F.cross_entropy(logits, labels)

        whole = _WholeBatch.apply(F.normalize(features), len(labels), ranks)  # (B, D)
        logits = whole @ F.normalize(weight).T / temperature  # (B, K of this rank)
        log_sum = torch.logsumexp(logits, dim=1)  # (B,), −inf on a rank without rows
        positive = -F.nll_loss(logits, labels, reduction="none", ignore_index=-1)  # (B,), 0 where another rank has it
        log_sums, positives = _AllRanks.apply(torch.stack([log_sum, positive]), ranks).unbind(1)  # (world_size, B)
        return (torch.logsumexp(log_sums, dim=0) - positives.sum(dim=0)).mean()


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


class _AllRanks(torch.autograd.Function):
    """A tensor of each rank to (world_size, ...), from which all ranks compute the same loss.

    So each has the whole gradient of its own part, and nothing is summed.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.rank = ranks.rank
        parts = part.new_empty(ranks.world_size, *part.shape)
        dist.all_gather_into_tensor(parts, part.contiguous())
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.rank], None
