"""kNN classification of features by cosine similarity (Wu et al., 1805.01978, section 3.4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.evaluate.features import FeatureSet
from trainer.evaluate.neighbours import nearest, predict
from trainer.evaluate.protocol import ProbeResult, split_held_out

K_CHOICES = (1, 5, 10, 20, 50, 100, 200)
"""Candidates for the number of neighbours."""
VOTE_TEMPERATURE = 0.07
"""A neighbour with cosine similarity s has exp(s / 0.07) votes."""
Setting = tuple[int, float]
"""k and temperature."""


@dataclass(frozen=True, kw_only=True)
class KnnResult:
    """Accuracies in percent for one k and temperature."""

    k: int
    temperature: float
    top1: float
    top5: float


def knn_top1(features: FeatureSet) -> ProbeResult:
    """Top-1 of the test images among all training images; k is chosen on held-out training images."""
    (k, _), held_out_top1 = choose_setting(features, [(k, VOTE_TEMPERATURE) for k in K_CHOICES])
    (result,) = knn(features, [(k, VOTE_TEMPERATURE)])
    return ProbeResult(top1=result.top1, setting=k, held_out_top1=held_out_top1)


def knn(features: FeatureSet, settings: Sequence[Setting], *, device: torch.device | str = "cpu") -> list[KnnResult]:
    """Accuracies of the test images among all training images, for each setting."""
    return _classify(
        features.train, features.train_labels, features.test, features.test_labels, settings, device=device
    )


def choose_setting(
    features: FeatureSet, settings: Sequence[Setting], *, device: torch.device | str = "cpu"
) -> tuple[Setting, float]:
    """The setting with the highest top-1 of held-out training images, the first if equal, and that top-1."""
    fitted, held_out = split_held_out(len(features.train))
    images, labels = features.train, features.train_labels
    results = _classify(images[fitted], labels[fitted], images[held_out], labels[held_out], settings, device=device)
    best = max(results, key=lambda result: result.top1)
    return (best.k, best.temperature), best.top1


def held_out_knn_top1(features: Tensor, labels: Tensor, k: int = 10) -> float:
    """Top-1 of held-out training images among the others, in percent, for a given k: a cheap probe during training.

    Features float32 [N, d], labels int64 [N]; a part of the training set makes it cheaper still.
    """
    fitted, held_out = split_held_out(len(features))
    settings = [(k, VOTE_TEMPERATURE)]
    return _classify(features[fitted], labels[fitted], features[held_out], labels[held_out], settings)[0].top1


def _classify(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    settings: Sequence[Setting],
    *,
    device: torch.device | str = "cpu",
) -> list[KnnResult]:
    """Result for each setting; bank [N, d] and queries [M, d] of any floating dtype, labels int64."""
    num_classes = int(torch.cat([bank_labels, query_labels]).max()) + 1
    num_neighbours = min(max(k for k, _ in settings), len(bank))
    similarity, index = nearest(bank, queries, num_neighbours, device=device)
    predicted = predict(similarity, bank_labels[index], num_classes, settings)
    results = []
    for (k, temperature), classes in predicted.items():
        correct = (classes == query_labels[:, None]).double()
        top1, top5 = 100 * correct[:, 0].mean().item(), 100 * correct.sum(dim=1).mean().item()
        results.append(KnnResult(k=k, temperature=temperature, top1=top1, top5=top5))
    return results
