"""Label-free monitors of a run, computed at logged steps from the step's embeddings, rows and gradients.

Each value is that of the whole batch, whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.loss import LossConfig
from weightserver.torch import Ranks, gathered, padded

RANKME_WINDOW = 2_048
"""RankMe is computed on the embeddings of this many images, the newest; of whole steps, so on a few more."""
_EPSILON = 1e-7
"""ε of RankMe (Garrido et al., 2210.02885, Equation 1)."""


@dataclass(frozen=True)
class Update:
    """What one update of the encoder and the rows leaves to observe; tensors are on the device, without gradients."""

    loss: Tensor
    """The batch's loss, a scalar."""
    embeddings: Tensor
    """The first view's embeddings of this rank's images, float32 (A, b, D), in the A parts of the batch."""
    classes: Tensor
    """This rank's rows before the update, as `RowStore.weights` returns them: float32 (K of this rank, D), padded."""
    labels: Tensor
    """Each image's own class among these rows, int64 (B,); -1 if another rank has it."""


class Monitors:
    """Computes the monitors of a run; every rank calls all methods. Between logged steps it only keeps embeddings."""

    def __init__(self, encoder: nn.Module, softmax: LossConfig, ranks: Ranks, *, batch_size: int) -> None:
        self._encoder = encoder
        self._cosine = softmax.softmax == "cosine"
        self._ranks = ranks
        self._steps: deque[Tensor] = deque(maxlen=math.ceil(RANKME_WINDOW / batch_size))
        self._gradient_norm = torch.tensor(math.nan)

    def keep(self, embeddings: Tensor) -> None:
        """Keeps a step's embeddings (A, b, D) for RankMe; every step is passed."""
        self._steps.append(embeddings)

    def measure_gradient(self) -> None:
        """Measures the encoder's gradient for the next call of `measure`, without waiting for the GPU."""
        self._gradient_norm = gradient_norm(self._encoder.parameters())

    @torch.no_grad()
    def measure(self, update: Update, num_rows: int) -> dict[str, float]:
        """The monitors of the step whose embeddings were kept last; `num_rows` of its classes are rows, not padding.

        Values that are not defined are left out: RankMe until its window is full, the mean cosine of a single image,
        and what has overflowed.
        """
        num_parts = len(update.embeddings)
        kept = torch.cat(list(self._steps))  # (A·steps, b, D)
        window = gathered(kept, len(update.labels) // num_parts, self._ranks, dim=1)  # (A·steps, B / A, D)
        top1 = self._instance_top1(window[-num_parts:], update, num_rows)
        unit = F.normalize(window.cpu().double(), dim=-1)  # (A·steps, B / A, D)
        batch = unit[-num_parts:].flatten(0, 1)  # (B, D)
        lengths, rows = self._ranks.sum_over_ranks([update.classes[:num_rows].norm(dim=1).sum().item(), num_rows])
        found = {
            "instance_top1": top1,
            "rankme": rankme(unit.flatten(0, 1)) if len(self._steps) == self._steps.maxlen else math.nan,
            "feature_std": feature_std(batch),
            "mean_cosine": mean_cosine(batch),
            "gradient_norm": float(self._gradient_norm),
            "row_norm": lengths / rows,
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _instance_top1(self, parts: Tensor, update: Update, num_rows: int) -> float:
        """Percent of images whose own class is first; parts (A, B / A, D) in turn take no more memory than the loss."""
        classes = F.normalize(update.classes) if self._cosine else update.classes
        correct = [
            is_own_class_first(F.normalize(part) if self._cosine else part, classes, labels, num_rows, self._ranks)
            for part, labels in zip(parts, torch.split(update.labels, parts.shape[1]), strict=True)
        ]
        return 100 * torch.cat(correct).double().mean().item()


def is_own_class_first(embeddings: Tensor, classes: Tensor, labels: Tensor, num_rows: int, ranks: Ranks) -> Tensor:
    """Whether each image's own class has a higher logit than every other class on any rank: bool (B,).

    Embeddings (B, D) are those of the whole batch; classes (K of this rank, D) and labels (B,) are as `Loss` takes
    them. Logits are inner products.
    """
    logits = embeddings @ padded(classes, 1).T  # (B, K of this rank)
    logits[:, num_rows:] = -math.inf
    column = labels.clamp(min=0)[:, None]
    logit = logits.gather(1, column)  # (B, 1)
    is_here = labels[:, None] >= 0
    own = torch.where(is_here, logit, -math.inf)
    others = logits.scatter_(1, column, torch.where(is_here, -math.inf, logit)).amax(dim=1, keepdim=True)
    both = torch.cat([own, others], dim=1)  # (B, 2)
    if ranks.world_size > 1:
        dist.all_reduce(both, dist.ReduceOp.MAX)
    return both[:, 0] > both[:, 1]


def rankme(features: Tensor) -> float:
    """RankMe of features (n, D) (Garrido et al., 2210.02885): the exponential of the singular values' entropy.

    At most min(n, D); 1 if all features are multiples of one vector.
    """
    tall = features if len(features) > features.shape[1] else features.T  # has n or D singular values, the fewer
    singular = torch.linalg.eigvalsh(tall.T @ tall).clamp(min=0).sqrt()
    share = singular / singular.sum() + _EPSILON
    return float((-(share * share.log()).sum()).exp())


def feature_std(unit: Tensor) -> float:
    """Standard deviation of each dimension of L2-normalised embeddings (n, D), averaged over dimensions.

    At most about 1/√D, that of directions spread evenly; 0 if all are the same (Chen and He, 2011.10566, section 4.1).
    """
    return float(unit.std(dim=0, correction=0).mean())


def mean_cosine(unit: Tensor) -> float:
    """Mean cosine of two different ones of n L2-normalised embeddings (n, D); NaN for a single one."""
    num_pairs = len(unit) * (len(unit) - 1)
    own = float(unit.square().sum())  # the cosine of each with itself
    return (float(unit.sum(dim=0).square().sum()) - own) / num_pairs if num_pairs else math.nan


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients together."""
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
