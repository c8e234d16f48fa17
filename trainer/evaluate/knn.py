"""kNN classification of features by cosine similarity (Wu et al., 1805.01978, section 3.4)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.evaluate.features import FeatureSet
from trainer.evaluate.protocol import ProbeResult, percent_correct, split_held_out

K_CHOICES = (1, 5, 10, 20, 50, 100, 200)
"""Candidates for the number of neighbours."""
VOTE_TEMPERATURE = 0.07
"""A neighbour with cosine similarity s has exp(s / 0.07) votes."""
_CHUNK = 500


def knn_top1(features: FeatureSet) -> ProbeResult:
    """Top-1 of the test images among all training images; k is chosen on held-out training images."""
    fitted, held_out = split_held_out(len(features.train))
    held_out_top1 = _accuracies(
        features.train[fitted],
        features.train_labels[fitted],
        features.train[held_out],
        features.train_labels[held_out],
        K_CHOICES,
    )
    k = max(held_out_top1, key=lambda choice: held_out_top1[choice])  # the smaller k if equal
    top1 = _accuracies(features.train, features.train_labels, features.test, features.test_labels, (k,))[k]
    return ProbeResult(top1=top1, setting=k, held_out_top1=held_out_top1[k])


def held_out_knn_top1(features: Tensor, labels: Tensor, k: int = 10) -> float:
    """Top-1 of held-out training images among the others, in percent, for a given k: a cheap probe during training.

    Features float32 [N, d], labels int64 [N]; a part of the training set makes it cheaper still.
    """
    fitted, held_out = split_held_out(len(features))
    return _accuracies(features[fitted], labels[fitted], features[held_out], labels[held_out], (k,))[k]


def _accuracies(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, query_labels: Tensor, choices: tuple[int, ...]
) -> dict[int, float]:
    """Accuracy in percent for each k; bank float32 [N, d], queries float32 [M, d], labels int64."""
    bank, queries = F.normalize(bank), F.normalize(queries)
    num_classes = int(torch.cat([bank_labels, query_labels]).max()) + 1
    num_neighbours = min(max(choices), len(bank))
    predictions: dict[int, list[Tensor]] = {k: [] for k in choices}
    for chunk in torch.split(queries, _CHUNK):
        similarity, nearest = (chunk @ bank.T).topk(num_neighbours)  # (M', num_neighbours), sorted
        votes = ((similarity - 1) / VOTE_TEMPERATURE).exp()
        labels = bank_labels[nearest]
        for k in choices:
            scores = torch.zeros(len(chunk), num_classes).scatter_add_(1, labels[:, :k], votes[:, :k])
            predictions[k].append(scores.argmax(dim=1))
    return {k: percent_correct(torch.cat(parts), query_labels) for k, parts in predictions.items()}
