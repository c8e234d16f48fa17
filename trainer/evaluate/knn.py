"""kNN classification of features by cosine similarity (Wu et al., 1805.01978, section 3.4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.features import FeatureSet
from trainer.evaluate.frozen import Frozen
from trainer.evaluate.neighbours import Features, nearest, predict
from trainer.evaluate.protocol import ProbeResult, split_held_out
from trainer.evaluate.stored_features import StoredFeatures, store_features
from trainer.settings import Settings

K_CHOICES = (1, 5, 10, 20, 50, 100, 200)
"""Candidates for the number of neighbours."""
VOTE_TEMPERATURE = 0.07
"""A neighbour with cosine similarity s has exp(s / 0.07) votes."""
SEARCHED_ROWS = 8_192
"""Queries whose neighbours are searched together, in one pass over the bank."""
Setting = tuple[int, float]
"""k and temperature."""


@dataclass(frozen=True, kw_only=True)
class KnnConfig(Settings):
    """Settings of the kNN protocol."""

    k: tuple[int, ...] | None = None
    """Numbers of neighbours; each gives a result, as --k 10 20 100 200 for DINO's table. Default: one of 1, 5, 10, 20,
    50, 100 and 200 is chosen on held-out training images."""
    temperature: tuple[float, ...] = (VOTE_TEMPERATURE,)
    """A neighbour with cosine similarity s has exp(s / temperature) votes. Of several, held-out training images choose
    (without --k), or each gives a result (with --k)."""

    def check(self) -> None:
        if self.k is not None and (not self.k or min(self.k) < 1):
            raise ValueError(f"--k is {self.k}: give one or more numbers, at least 1")
        if not self.temperature or not all(0 < number < math.inf for number in self.temperature):
            raise ValueError(f"--temperature is {self.temperature}: give one or more numbers, positive and finite")

    @property
    def settings(self) -> list[Setting]:
        return list(itertools.product(self.k or K_CHOICES, self.temperature))


@dataclass(frozen=True, kw_only=True)
class KnnResult:
    """Accuracies in percent for one k and temperature."""

    k: int
    temperature: float
    top1: float
    top5: float


def knn(evaluation: Evaluation, config: KnnConfig) -> Outcome:
    """Classifies the test images by the training images' features.

    Features are stored in half precision and read in blocks; memory does not grow with the number of images, except for
    labels and the neighbours of a rank's share of the queries (12 bytes times the highest k each).
    """
    dataset, ranks = evaluation.load(), evaluation.ranks
    dataset.check_labelled(tested=True)
    frozen = Frozen(evaluation.subject.network, evaluation.subject.pixels, ranks.device, bfloat16=evaluation.bfloat16)
    num_images = len(dataset.train_images) + len(dataset.test_images)
    with evaluation.progress("features", num_images) as advance:
        bank, queries = (
            store_features(frozen, images, dataset.evaluated_side, evaluation.state / name, ranks, advance)
            for name, images in (("train", dataset.train_images), ("test", dataset.test_images))
        )
    frozen.check()
    settings, labels, chosen = config.settings, dataset.train_labels, {}
    if config.k is None:
        _, held_out = split_held_out(len(bank))
        excluded = torch.zeros(len(bank), dtype=torch.bool).index_fill_(0, held_out, True)
        of_choices = _accuracies(
            evaluation, "held-out", bank, labels, bank.take(held_out), labels[held_out], settings, excluded
        )
        best = max(of_choices, key=lambda result: result.top1)  # the first of equals
        settings = [(best.k, best.temperature)]
        chosen = {
            "k": best.k,
            "temperature": best.temperature,
            "held_out_top1": best.top1,
            "on": f"{len(held_out)} training images, not used as neighbours for it",
        }
    results = _accuracies(evaluation, "test", bank, labels, queries, dataset.test_labels, settings)
    details = {} if len(results) == 1 else {"by_setting": [asdict(result) for result in results]}
    return Outcome(results={"top1": results[0].top1, "top5": results[0].top5}, chosen=chosen, details=details)


def _accuracies(
    evaluation: Evaluation,
    name: str,
    bank: StoredFeatures,
    bank_labels: Tensor,
    queries: Features,
    query_labels: Tensor,
    settings: Sequence[Setting],
    excluded: Tensor | None = None,
) -> list[KnnResult]:
    """Results for each setting, over the queries of all ranks."""
    ranks = evaluation.ranks
    mine = ranks.share(len(queries))
    size = len(bank) - (0 if excluded is None else int(excluded.sum()))
    num_neighbours = min(max(k for k, _ in settings), size)
    num_classes = int(torch.cat([bank_labels, query_labels]).max()) + 1
    correct = torch.zeros(len(settings), 2, dtype=torch.float64)
    with evaluation.progress(f"neighbours ({name})", len(queries)) as advance:
        for first in range(mine.start, mine.stop, SEARCHED_ROWS):
            rows = slice(first, min(mine.stop, first + SEARCHED_ROWS))
            similarity, index = nearest(bank, queries[rows], num_neighbours, excluded=excluded, device=ranks.device)
            correct += _correct(similarity, bank_labels[index], query_labels[rows], num_classes, settings)
            advance((rows.stop - rows.start) * ranks.world_size)
    sums = torch.tensor(ranks.sum_over_ranks(correct.flatten().tolist()), dtype=torch.float64).view(-1, 2)
    shares = 100 * sums / max(1, len(queries))
    return [
        KnnResult(k=min(k, size), temperature=temperature, top1=top1, top5=top5)
        for (k, temperature), (top1, top5) in zip(settings, shares.tolist(), strict=True)
    ]


def _correct(
    similarity: Tensor, labels: Tensor, wanted: Tensor, num_classes: int, settings: Sequence[Setting]
) -> Tensor:
    """Numbers of queries whose class is the first, and is among the first five: float64 [settings, 2]."""
    predicted = predict(similarity, labels, num_classes, settings).values()
    found = [(classes == wanted[:, None]).double() for classes in predicted]
    return torch.stack([torch.stack([each[:, 0].sum(), each.sum()]) for each in found])


# ---- features in memory, for the demo, the report and evaluations during training


def knn_top1(features: FeatureSet) -> ProbeResult:
    """Top-1 of the test images among all training images; k is chosen on held-out training images."""
    settings = [(k, VOTE_TEMPERATURE) for k in K_CHOICES]
    fitted, held_out = split_held_out(len(features.train))
    images, labels = features.train, features.train_labels
    of_choices = _shares(images[fitted], labels[fitted], images[held_out], labels[held_out], settings)[:, 0].tolist()
    best = of_choices.index(max(of_choices))  # the first of equals
    top1, top5 = _shares(images, labels, features.test, features.test_labels, [settings[best]])[0].tolist()
    return ProbeResult(top1=top1, top5=top5, setting=settings[best][0], held_out_top1=of_choices[best])


def leave_one_out_knn_top1(features: Tensor, labels: Tensor, k: int = 10) -> float:
    """Top-1 of each image among all others, in percent, for a given k: a cheap probe during training.

    Features float32 [n, d], labels int64 [n]; n ≥ 2.
    """
    k = min(k, len(features) - 1)
    similarity, index = nearest(features, features, k + 1)  # (n, k + 1)
    is_self = index == torch.arange(len(index))[:, None]
    is_self[:, -1] |= ~is_self.any(dim=1)  # as many equal images come before it
    similarity, found = similarity[~is_self].view(-1, k), labels[index][~is_self].view(-1, k)
    correct = _correct(similarity, found, labels, int(labels.max()) + 1, [(k, VOTE_TEMPERATURE)])
    return float(100 * correct[0, 0] / len(features))


def _shares(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, query_labels: Tensor, settings: Sequence[Setting]
) -> Tensor:
    """Top-1 and top-5 in percent for each setting: float64 [settings, 2]."""
    num_classes = int(torch.cat([bank_labels, query_labels]).max()) + 1
    similarity, index = nearest(bank, queries, min(max(k for k, _ in settings), len(bank)))
    return 100 * _correct(similarity, bank_labels[index], query_labels, num_classes, settings) / len(queries)
