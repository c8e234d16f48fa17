"""The softmax over the active rows (Equation 1 of the paper), of cosines or products, on one rank or many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weightserver.core.arrays import checked_number
from weightserver.torch.margins import MarginKind, distinct, margin_of, own_values, quality_of, with_margin
from weightserver.torch.ranks import Ranks, gathered

DEFAULT_TEMPERATURE = 0.2
_LARGEST_SPREAD = 80.0
"""If logits differ by less than this, no maximum need be subtracted: e⁻⁸⁰ is a normal float32, 1.8e-35."""


@dataclass(frozen=True)
class Loss:
    """The softmax over the active classes (Equation 1): of cosines, or of inner products.

    Raises:
        ValueError: settings out of range, or settings of cosines for products that are none.
    """

    softmax: Literal["cosine", "plain"] = "cosine"
    """Logits are cosines divided by τ, or inner products ("plain")."""
    temperature: float = DEFAULT_TEMPERATURE
    """τ, which divides cosines."""
    margin: MarginKind = "none"
    """On the cosine of an image's own class: "none", "cosface", "arcface" or "adaface"; see `Margin`."""
    margin_size: float | None = None
    """m; by default the usual one."""

    def __post_init__(self) -> None:
        if self.softmax not in ("cosine", "plain"):
            raise ValueError(f"softmax must be 'cosine' or 'plain', got {self.softmax!r}")
        if not 0 < checked_number(self.temperature, "temperature") < math.inf:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        margin_of(self.margin, self.margin_size)
        if self.softmax == "plain" and self.margin != "none":
            raise ValueError(f"margin {self.margin!r} is for cosines: choose softmax='cosine', or no margin")
        if self.softmax == "plain" and self.temperature != DEFAULT_TEMPERATURE:
            raise ValueError("temperature divides cosines, but softmax='plain': omit one of them")

    @property
    def cosines(self) -> bool:
        return self.softmax == "cosine"

    @property
    def divisor(self) -> float:
        """τ; 1 for inner products."""
        return self.temperature if self.cosines else 1.0

    def __call__(
        self,
        features: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        ranks: Ranks | None = None,
        num_rows: int | None = None,
    ) -> Tensor:
        """Mean cross-entropy of logits cos(w_j, z_i)/τ, or w_j·z_i, over the whole batch, a scalar.

        Features (B, D) and weight (K, D) are float32; labels int64 (B,) index the rows of weight. Logits are float32
        even under autocast. For cosines, features and weight are L2-normalised here. A margin changes the cosines of an
        image's own classes before they are divided by τ; papers about margins call 1/τ the scale s. The margin adaface
        depends on the norms of the features, which get no gradient through it.

        Labels (B, P) give an image up to P own classes, -1 for fewer, at least one; a class given twice counts once.
        The target distribution is uniform over an image's own classes C_i, as in Mahajan et al. (ECCV 2018):
        −1/|C_i| · Σ_{c ∈ C_i} log softmax(l_i)_c = log Σ_j exp(l_ij) − mean of l_ic over c ∈ C_i.

        With `ranks`, features are those of this rank's share of the batch (`Ranks.share`) and weight is this rank's
        share of the K rows, of any size; labels are those of the whole batch, -1 if another rank has the row. All ranks
        call it, and its backward; each gets the same loss and exactly dLoss/dweight. Features get dLoss/dfeatures times
        world_size, so that an encoder whose gradients are averaged over ranks (DistributedDataParallel) trains as on
        one rank. Of products, or if the temperature is low, they exchange each image's largest logit.

        If `num_rows` is given, only the first `num_rows` rows of weight are classes; the others, which `padded` added,
        change neither the loss nor a gradient.

        Autograd keeps the log-probabilities, float32 (B, K of this rank), and both passes need three such matrices at
        their peak: 384 MiB for 512 images and 65,536 rows.
        """
        margin = margin_of(self.margin, self.margin_size)
        with torch.autocast(features.device.type, enabled=False):
            own = distinct(labels) if labels.dim() == 2 else labels[:, None]  # (B, P)
            quality = None
            if margin.kind == "adaface":
                norms = features.detach().norm(dim=1)
                quality = quality_of(norms if ranks is None else gathered(norms, len(labels), ranks))
            if self.cosines:
                features, weight = F.normalize(features), F.normalize(weight)
            if not (on_one_rank := ranks is None or ranks.world_size == 1):
                features = _WholeBatch.apply(features, len(labels), ranks)  # type: ignore[no-untyped-call]
            products = _only_first(features @ weight.T, num_rows)  # (B, K)
            logits = with_margin(products, own, margin, quality) / self.divisor
            if on_one_rank:
                return _loss_of_logits(logits, own)
            is_bounded = self.cosines and (1 - margin.lowest_cosine) / self.temperature < _LARGEST_SPREAD
            return _loss_over_ranks(logits, own, 1 / self.temperature if is_bounded else None)


def _loss_of_logits(logits: Tensor, own: Tensor) -> Tensor:
    """The loss of logits (B, K) of all classes, whose columns `own` (B, P) are each image's own."""
    if own.shape[1] == 1:
        return F.cross_entropy(logits, own[:, 0])
    values, is_own = own_values(logits, own)
    return (logits.logsumexp(dim=1) - values.sum(dim=1) / is_own.sum(dim=1)).mean()


def _loss_over_ranks(logits: Tensor, own: Tensor, largest_logit: float | None) -> Tensor:
    """`_loss_of_logits` where each rank has the logits (B, K of this rank) of its classes."""
    # Subtracting a constant keeps the softmax unchanged and exp in range.
    logits = logits - (_largest_of_each(logits) if largest_logit is None else largest_logit)
    values, is_own = own_values(logits, own)  # of other ranks' rows 0
    parts = torch.stack([logits.exp().sum(dim=1), values.sum(dim=1), is_own.sum(dim=1)])  # (3, B)
    total, positive, count = _SumOverRanks.apply(parts)  # type: ignore[no-untyped-call]
    loss: Tensor = (total.log() - positive / count).mean()
    return loss


def _only_first(logits: Tensor, num_rows: int | None) -> Tensor:
    """Logits (B, K) with -inf for all but the first `num_rows` classes; for all of them if None."""
    if num_rows is None or num_rows >= logits.shape[1]:
        return logits
    return logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= num_rows, -math.inf)


def _largest_of_each(logits: Tensor) -> Tensor:
    """Each image's largest logit over the rows of all ranks: (B, K of this rank) to (B, 1)."""
    largest = logits.detach().amax(dim=1) if logits.shape[1] else logits.new_full(logits.shape[:1], -math.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest[:, None]


def padded_rows(num_active: int, surplus: int, ranks: Ranks) -> int:
    """Number of rows that a rank's share of K is padded to, so that shapes on a GPU are the same in nearly every step.

    Blocks are assigned evenly, up to a `surplus` of rows, active rows randomly: 4 standard deviations and half the
    surplus more than the mean.
    """
    if ranks.world_size == 1:
        return num_active
    mean = num_active / ranks.world_size
    return min(num_active, math.ceil(mean + surplus / 2 + 4 * math.sqrt(mean)))


def padded(weight: Tensor, num_rows: int) -> Tensor:
    """Rows (K of this rank, D), padded with zeros to at least `num_rows` rows."""
    return F.pad(weight, (0, 0, 0, num_rows - len(weight))) if len(weight) < num_rows else weight


class _WholeBatch(torch.autograd.Function):
    """Gathers the features (b, D) of each rank into those of the batch (B, D), to compare with each rank's rows."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, batch_size: int, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        share = ranks.share(batch_size)
        assert len(features) == share.stop - share.start, "features of this rank's share of the batch"
        return gathered(features, batch_size, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)  # (B, D), through this rank's rows
        dist.all_reduce(gradient)
        # DistributedDataParallel divides by world_size, but this is already a sum over the batch: undo the division.
        return gradient[ctx.ranks.share(len(gradient))] * ctx.ranks.world_size, None, None


class _SumOverRanks(torch.autograd.Function):
    """Sums over ranks. All ranks compute the same loss from the sum, so each summand gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor) -> Tensor:
        total = summand.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
