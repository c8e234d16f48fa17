"""Training on random crops of labelled images and tests on centre crops, for linear and fine-tuning protocols."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trainer.data import TrainImages
from trainer.data.augment import Augmentation, AugmentationConfig
from trainer.data.prefetch import Visits
from trainer.evaluate.frozen import centres
from trainer.evaluate.progress import Advance
from trainer.schedule import visit_uniforms
from weightserver.torch import Ranks

CROPS = AugmentationConfig(strong=False, min_scale=0.08)
"""torchvision's RandomResizedCrop with its defaults, and a flip."""
_TEST_BATCH = 256
_TOP = 5


def batches_of_epoch(ids: Tensor, batch_size: int, *, seed: int, epoch: int, ranks: Ranks) -> list[Visits]:
    """This rank's part of each batch of an epoch, in a random order; the last images that fill no batch are omitted."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = ids[torch.randperm(len(ids), generator=generator)].numpy()
    mine, batches = ranks.share(batch_size), []
    for start in range(0, len(ids) // batch_size * batch_size, batch_size):
        places = np.arange(start + mine.start, start + mine.stop)
        uniforms = visit_uniforms(seed, epoch * len(order) + places[None], Augmentation.num_uniforms)
        batches.append(Visits(order[places], uniforms))  # [b], [1, b, num_uniforms]
    return batches


def cosine(progress: float) -> float:
    """The factor of the learning rate after a part `progress` (0..1) of all steps."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def check_batch(num_images: int, batch_size: int, ranks: Ranks) -> None:
    """Raises ValueError if the images make no batch, or a batch leaves ranks without images."""
    if num_images < batch_size:
        raise ValueError(f"{num_images} images make no batch of {batch_size}: give a smaller --batch-size")
    if batch_size < ranks.world_size:
        raise ValueError(
            f"--batch-size {batch_size} leaves some of {ranks.world_size} ranks without images: give larger batches or "
            "fewer ranks"
        )


def check_loss(loss: Tensor, epoch: int) -> None:
    """Raises ValueError for the last loss of an epoch, or a sum of losses, that is not finite."""
    if not loss.isfinite():
        raise ValueError(f"the loss is {loss.item()} after {epoch + 1} epochs: give a lower learning rate")


def accuracies(
    classify: Callable[[Tensor], list[Tensor]],
    images: TrainImages,
    ids: Tensor,
    labels: Tensor,
    side: int | None,
    ranks: Ranks,
    advance: Advance,
) -> list[tuple[float, float]]:
    """Top-1 and top-5 in percent of each classifier, by centre crops of images `ids` (int64 [n]) of classes `labels`.

    Each rank classifies a part of the images, and each image is counted once.

    Args:
        classify: maps a batch uint8 [b, C, side, side] to each classifier's logits [b, num_classes].
    """
    mine = ranks.share(len(ids))
    ids, labels = ids[mine], labels[mine]
    correct: list[Tensor] = []
    for batch, wanted in zip(centres(images, side, ids, _TEST_BATCH), torch.split(labels, _TEST_BATCH), strict=True):
        found = [logits.topk(min(_TOP, logits.shape[1])).indices.cpu() == wanted[:, None] for logits in classify(batch)]
        advance(len(batch) * ranks.world_size)
        correct.append(torch.stack([torch.stack([each[:, 0].sum(), each.sum()]) for each in found]))
    counts = torch.stack(correct).sum(dim=0).double()  # (classifiers, 2)
    sums = ranks.sum_over_ranks([*counts.flatten().tolist(), float(len(ids))])
    shares = [100 * number / max(1.0, sums[-1]) for number in sums[:-1]]
    return list(zip(shares[::2], shares[1::2], strict=True))
