"""kNN classification of features by cosine similarity (Wu et al., 1805.01978, section 3.4)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data import TrainImages
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.features import Advance, FeatureSet, Frozen
from trainer.evaluate.neighbours import nearest, predict
from trainer.evaluate.protocol import ProbeResult, num_correct, percent_correct, splits_held_out
from trainer.evaluate.settings import K_CHOICES, VOTE_TEMPERATURE, KnnConfig
from weightserver.common.atomic_files import sync
from weightserver.torch import Ranks

BLOCK_ROWS = 4_096
"""Features that are computed and stored together: 16 MiB of 2,048 values each."""
SEARCHED_ROWS = 8_192
"""Queries whose neighbours are searched together, in one pass over the bank."""


@dataclass(frozen=True, kw_only=True)
class KnnResult:
    """Accuracies in percent for one k."""

    k: int
    top1: float
    top5: float


def knn(evaluation: Evaluation, config: KnnConfig) -> Outcome:
    """Classifies the test images by the training images' features.

    Features are stored in mapped files; memory does not grow with the number of images, except for labels and the
    neighbours of a rank's share of the queries (12 bytes times the highest k each).
    """
    dataset, ranks, frozen = evaluation.labelled(), evaluation.ranks, evaluation.frozen()
    num_images = len(dataset.train_images) + len(dataset.test_images)
    with evaluation.progress("features", num_images) as advance:
        bank, queries = (
            stored_features(frozen, images, dataset.evaluated_side, evaluation.state / name, ranks, advance)
            for name, images in (("train", dataset.train_images), ("test", dataset.test_images))
        )
    frozen.check()
    numbers, labels, chosen = config.k or K_CHOICES, dataset.train_labels, {}
    if config.k is None:
        splits, found = [held_out for _, held_out in splits_held_out(len(bank))], []
        number = sum(map(len, splits))
        with evaluation.progress("neighbours (held-out)", number) as advance:
            for held_out in splits:
                excluded = torch.zeros(len(bank), dtype=torch.bool).index_fill_(0, held_out, True)
                wanted = labels[held_out]
                found.append(classified(bank, labels, bank[held_out], wanted, numbers, ranks, advance, excluded))
        best, top1 = _best(found)
        numbers = (found[0][best].k,)
        chosen = {
            "k": numbers[0],
            "held_out_top1": top1,
            "on": f"{number} training images, not used as neighbours for it",
        }
    with evaluation.progress("neighbours (test)", len(queries)) as advance:
        results = classified(bank, labels, queries, dataset.test_labels, numbers, ranks, advance)
    details = {} if len(results) == 1 else {"by_setting": [asdict(result) for result in results]}
    return Outcome(results={"top1": results[0].top1, "top5": results[0].top5}, chosen=chosen, details=details)


def stored_features(
    frozen: Frozen, images: TrainImages, side: int | None, directory: Path, ranks: Ranks, advance: Advance
) -> Tensor:
    """Features of all images, of length 1, float16 [N, d], in a mapped file in `directory`, on which ranks may share
    the work: each computes every n-th block, unless an earlier call has.

    Raises:
        ValueError: features that are not finite.
        RuntimeError: the encoder has changed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shape = (len(images), frozen.of_images(images, side, torch.arange(min(1, len(images)))).shape[-1])
    with (directory / "features").open("ab") as file:
        file.truncate(2 * shape[0] * shape[1])
    for block in range(ranks.rank, -(-len(images) // BLOCK_ROWS), ranks.world_size):
        ids = torch.arange(block * BLOCK_ROWS, min(len(images), (block + 1) * BLOCK_ROWS))
        if not (done := directory / f"{block}.done").exists():
            features = F.normalize(frozen.of_images(images, side, ids)).half()
            frozen.check()
            with (directory / "features").open("r+b") as file:  # through a map, a full disk would kill the process
                file.seek(2 * shape[1] * block * BLOCK_ROWS)
                file.write(features.cpu().numpy().tobytes())
            sync(directory / "features")
            done.touch()
        advance(len(ids) * ranks.world_size)
    ranks.barrier()
    return torch.from_numpy(np.memmap(directory / "features", np.float16, "r+", shape=shape))


def knn_top1(features: FeatureSet) -> ProbeResult:
    """Evaluates features in memory, for the demo, the report and evaluations during training."""
    images, labels = features.train, features.train_labels
    best, held_out_top1 = _best(
        [
            classified(images[fitted], labels[fitted], images[held_out], labels[held_out], K_CHOICES)
            for fitted, held_out in splits_held_out(len(images))
        ]
    )
    (result,) = classified(images, labels, features.test, features.test_labels, [K_CHOICES[best]])
    return ProbeResult(top1=result.top1, top5=result.top5, setting=K_CHOICES[best], held_out_top1=held_out_top1)


def _best(found: Sequence[Sequence[KnnResult]]) -> tuple[int, float]:
    """Which number of neighbours is best over equal splits, the first of equals, and its top-1 in percent."""
    means = [statistics.fmean(result.top1 for result in of_number) for of_number in zip(*found, strict=True)]
    best = max(range(len(means)), key=means.__getitem__)
    return best, means[best]


def leave_one_out_knn_top1(features: Tensor, labels: Tensor, k: int = 10) -> float:
    """Top-1 of each image among all others, in percent, for a given k: a cheap probe during training.

    Features float32 [n, d], labels int64 [n]; n ≥ 2.
    """
    k = min(k, len(features) - 1)
    similarity, index = nearest(features, features, k + 1)  # (n, k + 1)
    is_self = index == torch.arange(len(index))[:, None]
    is_self[:, -1] |= ~is_self.any(dim=1)  # as many equal images come before it
    similarity, found = similarity[~is_self].view(-1, k), labels[index][~is_self].view(-1, k)
    predicted = predict(similarity, found, int(labels.max()) + 1, k=k, temperature=VOTE_TEMPERATURE, top=1)
    return percent_correct(predicted[:, 0], labels)


def classified(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    numbers: Sequence[int],
    ranks: Ranks | None = None,
    advance: Advance = lambda *_, **__: None,
    excluded: Tensor | None = None,
) -> list[KnnResult]:
    """Results for each of these numbers of neighbours, over the queries of all ranks.

    Args:
        excluded: bool [N], bank features that count as no one's neighbour.
    """
    ranks = ranks or Ranks()
    mine = ranks.share(len(queries))
    size = len(bank) - (0 if excluded is None else int(excluded.sum()))
    num_neighbours = min(max(numbers), size)
    num_classes = int(torch.cat([bank_labels, query_labels]).max()) + 1
    correct = torch.zeros(len(numbers), 2, dtype=torch.float64)
    for first in range(mine.start, mine.stop, SEARCHED_ROWS):
        rows = slice(first, min(mine.stop, first + SEARCHED_ROWS))
        similarity, index = nearest(bank, queries[rows], num_neighbours, excluded=excluded, device=ranks.device)
        for count, k in zip(correct, numbers, strict=True):
            predicted = predict(similarity, bank_labels[index], num_classes, k=k, temperature=VOTE_TEMPERATURE)
            count += num_correct(predicted, query_labels[rows])
        advance((rows.stop - rows.start) * ranks.world_size)
    sums = torch.tensor(ranks.sum_over_ranks(correct.flatten().tolist()), dtype=torch.float64).view(-1, 2)
    shares = 100 * sums / max(1, len(queries))
    return [
        KnnResult(k=min(k, size), top1=top1, top5=top5)
        for k, (top1, top5) in zip(numbers, shares.tolist(), strict=True)
    ]
