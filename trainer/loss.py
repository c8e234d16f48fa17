"""The cosine softmax over the active rows (Equation 1 of the paper with cosine logits)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cosine_softmax_loss(features: Tensor, weight: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Mean cross-entropy of logits cos(w_i, z)/τ, a scalar; chance is log K.

    Features (B, D) and weight (K, D) are L2-normalised here, both float32; labels int64 (B,) index the rows of weight.
    """
    logits = F.normalize(features) @ F.normalize(weight).T / temperature  # (B, K)
    return F.cross_entropy(logits, labels)
