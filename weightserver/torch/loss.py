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
from weightserver.torch.margins import (
    NO_MARGIN,
    Margin,
    MarginKind,
    distinct,
    margin_of,
    own_values,
    quality_of,
    with_margin,
)
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
    """Of cosines, or of inner products ("plain")."""
    temperature: float = DEFAULT_TEMPERATURE
    """τ, which divides cosines."""
    margin: MarginKind = "none"
    """On the cosine of an image's own class: "none", "cosface", "arcface" or "adaface"; see `Margin`."""
    margin_size: float | None = None
    """m; by default the usual one."""
    label_smoothing: float = 0.0
    """Share of the target distribution that is spread evenly over all active classes, at least 0 and below 1; see
    `softmax_loss`."""

    def __post_init__(self) -> None:
        if self.softmax not in ("cosine", "plain"):
            raise ValueError(f"softmax must be 'cosine' or 'plain', got {self.softmax!r}")
        checked_temperature(self.temperature)
        if not 0 <= checked_number(self.label_smoothing, "label_smoothing") < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing:g}")
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
        temperature: float | None = None,
    ) -> Tensor:
        """The loss; with `temperature`, by that τ."""
        return softmax_loss(
            features,
            weight,
            labels,
            temperature=self.divisor if temperature is None else temperature,
            ranks=ranks,
            num_rows=num_rows,
            margin=margin_of(self.margin, self.margin_size),
            label_smoothing=self.label_smoothing,
            cosines=self.cosines,
        )


def checked_temperature(temperature: float) -> float:
    """The temperature. Raises TypeError if it is no number, ValueError unless it is positive and finite."""
    if not 0 < checked_number(temperature, "temperature") < math.inf:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return temperature


def cosine_softmax_loss(
    features: Tensor, weight: Tensor, labels: Tensor, *, temperature: float, **settings: Any
) -> Tensor:
    """`softmax_loss` of logits cos(w_j, z_i)/τ (Equation 1); features and weight are L2-normalised here, in float32.

    A margin changes the cosines of an image's own classes before they are divided by τ; papers about margins call
    1/τ the scale s. The margin adaface depends on the norms of the features, which get no gradient through it.
    """
    return softmax_loss(features, weight, labels, temperature=temperature, cosines=True, **settings)


def softmax_loss(
    features: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    ranks: Ranks | None = None,
    num_rows: int | None = None,
    margin: Margin = NO_MARGIN,
    label_smoothing: float = 0.0,
    cosines: bool = False,
) -> Tensor:
    """Mean cross-entropy of logits w_j·z_i/τ over the whole batch, a scalar.

    Features (B, D) and weight (K, D) are float32; labels int64 (B,) index the rows of weight. Logits are float32 even
    under autocast.

    Labels (B, P) give an image up to P own classes, -1 for fewer, at least one; a class given twice counts once. The
    target distribution is uniform over an image's own classes C_i, as in Mahajan et al. (ECCV 2018):
    −1/|C_i| · Σ_{c ∈ C_i} log softmax(l_i)_c = log Σ_j exp(l_ij) − mean of l_ic over c ∈ C_i.

    With `label_smoothing` s, the target distribution is (1 − s) of that plus s spread evenly over all active classes of
    all ranks, the own ones included: torch.nn.functional.cross_entropy(label_smoothing=s) over these classes.

    With `ranks`, features are those of this rank's share of the batch (`Ranks.share`) and weight is this rank's share
    of the K rows, of any size; labels are those of the whole batch, -1 if another rank has the row. All ranks call it,
    and its backward; each gets the same loss and exactly dLoss/dweight. Features get dLoss/dfeatures times world_size,
    so that an encoder whose gradients are averaged over ranks (DistributedDataParallel) trains as on one rank.

    If `num_rows` is given, only the first `num_rows` rows of weight are classes; the others, which `padded` added,
    change neither the loss nor a gradient. With `cosines`, features and weight are L2-normalised here; otherwise, or if
    the temperature is low, the ranks exchange each image's largest logit.

    Autograd keeps the log-probabilities, float32 (B, K of this rank), and both passes need three such matrices at their
    peak: 384 MiB for 512 images and 65,536 rows.
    """
    with torch.autocast(features.device.type, enabled=False):
        own = distinct(labels) if labels.dim() == 2 else labels[:, None]  # (B, P)
        on_one_rank = ranks is None or ranks.world_size == 1
        quality = None
        if margin.kind == "adaface":
            norms = features.detach().norm(dim=1)
            quality = quality_of(norms if ranks is None else gathered(norms, len(labels), ranks))
        features = F.normalize(features) if cosines else features
        if not on_one_rank:
            features = _WholeBatch.apply(features, len(labels), ranks)  # type: ignore[no-untyped-call]
        products = _only_first(features @ (F.normalize(weight) if cosines else weight).T, num_rows)  # (B, K)
        logits = with_margin(products, own, margin, quality) / temperature
        if on_one_rank:
            loss = _loss_of_logits(logits, own)
        else:
            is_bounded = cosines and (1 - margin.lowest_cosine) / temperature < _LARGEST_SPREAD
            loss = _loss_over_ranks(logits, own, 1 / temperature if is_bounded else None)
        if label_smoothing:
            loss = loss + label_smoothing * _own_above_all(logits[:, :num_rows], own, on_one_rank=on_one_rank)
        return loss


def _own_above_all(logits: Tensor, own: Tensor, *, on_one_rank: bool) -> Tensor:
    """The mean logit of an image's own classes less that of all classes, averaged over the batch: a scalar.

    Args:
        logits: (B, K of this rank), whose columns `own` (B, P) are each image's own classes.
    """
    values, is_own = own_values(logits, own)
    num_all = torch.full(logits.shape[:1], logits.shape[1], device=logits.device)
    parts = torch.stack([values.sum(dim=1), is_own.sum(dim=1), logits.sum(dim=1), num_all])  # (4, B)
    if not on_one_rank:
        parts = _SumOverRanks.apply(parts)  # type: ignore[no-untyped-call]
    of_own, num_own, of_all, num_all = parts
    difference: Tensor = (of_own / num_own - of_all / num_all).mean()
    return difference


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
