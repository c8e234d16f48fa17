"""What the protocols share: which training images are held out to choose a setting on, and what a result holds."""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_HELD_OUT = 5_000
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The outcome of one protocol for one set of features."""

    top1: float
    """Accuracy on the test images, in percent."""
    setting: float
    """What was chosen on held-out training images: k, or the strength of regularisation."""
    held_out_top1: float
    """Accuracy with that setting on the held-out training images, in percent."""


def split_held_out(num_images: int) -> tuple[Tensor, Tensor]:
    """Returns indexes int64 of the training images to fit on and of those held out; the same for all features.

    5,000 are held out, a tenth where that is fewer.
    """
    if num_images < 10:
        raise ValueError(f"{num_images} training images: at least 10 are needed to hold some out")
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(_SEED))
    num_held_out = min(NUM_HELD_OUT, num_images // 10)
    return order[num_held_out:], order[:num_held_out]


def percent_correct(predictions: Tensor, labels: Tensor) -> float:
    """Accuracy of int64 [n] against int64 [n], in percent."""
    return 100.0 * (predictions == labels).double().mean().item()
