"""Common parts of the protocols: the split of held-out training images, and the result."""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_HELD_OUT = 5_000
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The result of one protocol for one set of features."""

    top1: float
    """Accuracy on the test images, in percent."""
    setting: float
    """The setting chosen on held-out training images: k, or the strength of regularisation."""
    top5: float
    """The same for the five likeliest classes."""
    held_out_top1: float
    """Accuracy with that setting on the held-out training images, in percent."""


def split_held_out(num_images: int) -> tuple[Tensor, Tensor]:
    """Indexes, int64, of the training images to fit on and of those held out; the same for all features.

    5,000 are held out, or a tenth if that is fewer.
    """
    if num_images < 10:
        raise ValueError(f"{num_images} training images are too few to hold some out: at least 10 are needed")
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(_SEED))
    num_held_out = min(NUM_HELD_OUT, num_images // 10)
    return order[num_held_out:], order[:num_held_out]


def percent_correct(predictions: Tensor, labels: Tensor) -> float:
    """Accuracy of int64 [n] against int64 [n], in percent."""
    return 100.0 * (predictions == labels).double().mean().item()
