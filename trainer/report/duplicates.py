"""Finds pairs of training images that are nearly the same: pic duplicates RUN.

Two images are compared by their rows of the classifier: each image is a class of its own, and images that look alike
under every augmentation get rows of the same direction. Rows average the features of all views of an image, so after a
training of usual length they tell copies from merely similar images better than the features do (docs/images.md). The
pairs are written to duplicates.json in the run's directory, and the run's report shows them. No image is read and no
encoder is needed.

All pairs are compared in float32, in 2·N²·D operations for N rows of D values. Rows are fetched a block at a time as
they are needed, so that memory does not grow with N·D.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer.evaluate.neighbours import nearest
from trainer.run.stored_rows import StoredRows
from weightserver import Checkpoint, WeightClient
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.checkpoints import chosen_checkpoint

FILE = "duplicates.json"
_ROWS_AT_A_TIME = 8_192
"""Rows that are compared with all others together. All rows are fetched once for each such block, in 2 % of the time
of its products."""


@dataclass(frozen=True)
class Duplicates:
    """The contents of duplicates.json."""

    checkpoint: str
    """Whose rows were compared; empty for the newest rows."""
    step: int
    threshold: float
    neighbours: int
    """Number of neighbours of each image that were looked at."""
    images_at_limit: int
    """Images that may have more pairs, because all of these neighbours reached the threshold."""
    num_pairs: int
    """Number of pairs found."""
    pairs: list[tuple[int, int, float]]
    """The most similar of them, in falling order: two images, as positions in the data set, and their rows' cosine."""


def find_duplicates(
    stored: StoredRows,
    checkpoint: str | None = None,
    *,
    threshold: float = 0.98,
    neighbours: int = 8,
    most_pairs: int = 10_000,
    on_rows: Callable[[int], object] = lambda count: None,
) -> Duplicates:
    """Compares the rows of all images of a run, in their state at a checkpoint or now.

    The row of an image that was never trained is the random one that it began with, far from all others.

    Args:
        threshold: smallest cosine of two rows that makes a pair.
        neighbours: number of each image's neighbours to look at.
        most_pairs: number of pairs to return, the most similar.
        on_rows: called with the number of rows that were compared since the last call.

    Raises:
        ValueError: a number out of range, or rows of classes that images share.
        NoTableError: there is no such checkpoint.
        DataLossError, ClusterError: without `checkpoint`, the shards hold rows of different times.
    """
    if not -1 < threshold <= 1:
        raise ValueError(f"--threshold must lie above -1 and not above 1, got {threshold}")
    if not 1 <= neighbours < 4_096:
        raise ValueError(f"--neighbours must lie in 1..4095, got {neighbours}")
    if most_pairs < 1:
        raise ValueError(f"--most-pairs must be at least 1, got {most_pairs}")
    if stored.unit != "image":
        raise ValueError("the run's rows are those of classes (--labels): give a run without")
    kept, step = _state(stored, checkpoint)
    all_rows = _Weights(stored.client, stored.num_images, kept, step)
    found, num_at_limit = _all_pairs(all_rows, threshold, neighbours, on_rows)
    most_similar = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:most_pairs]
    images = stored.order.images(np.array([pair for pair, _ in most_similar], np.int64).reshape(-1))
    pairs = zip(np.sort(images.reshape(-1, 2), axis=1).tolist(), most_similar, strict=True)
    return Duplicates(
        checkpoint=kept.name if kept else "",
        step=step,
        threshold=threshold,
        neighbours=neighbours,
        images_at_limit=num_at_limit,
        num_pairs=len(found),
        pairs=[(one, other, round(cosine, 6)) for (one, other), (_, cosine) in pairs],
    )


def _all_pairs(
    all_rows: _Weights, threshold: float, neighbours: int, on_rows: Callable[[int], object]
) -> tuple[dict[tuple[int, int], float], int]:
    """The cosine of each pair of rows that reached the threshold, and the number of rows that may have more pairs."""
    found, num_at_limit = dict[tuple[int, int], float](), 0
    for first in range(0, len(all_rows), _ROWS_AT_A_TIME):
        rows = np.arange(first, min(first + _ROWS_AT_A_TIME, len(all_rows)))
        num_near = min(neighbours + 1, len(all_rows))  # a row's own included
        near = nearest(all_rows, all_rows[first : first + len(rows)], num_near)
        similarity, near_rows = (values.numpy() for values in near)
        reached = (similarity >= threshold) & (near_rows != rows[:, None])
        num_at_limit += int((reached.sum(axis=1) >= neighbours).sum())
        found |= _pairs(rows, near_rows, similarity, reached)
        on_rows(len(rows))
    return found, num_at_limit


@dataclass(frozen=True)
class _Weights:
    """The weights of the images' rows as `Features`, fetched when they are read."""

    client: WeightClient
    num_rows: int
    checkpoint: Checkpoint | None
    step: int

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        """float32 [n, D]."""
        numbers = np.arange(self.num_rows)[rows]
        return torch.from_numpy(self.client.fetch(numbers, step=self.step, checkpoint=self.checkpoint or ""))


def _state(stored: StoredRows, checkpoint: str | None) -> tuple[Checkpoint | None, int]:
    """The checkpoint to read, None for the newest rows, and the step that rows are corrected to."""
    if checkpoint is None:
        stored.client.require_common_state()
        return None, stored.client.describe().clock
    kept = chosen_checkpoint(checkpoint, stored.client.checkpoints())
    return kept, kept.step


def _pairs(
    rows: Int64Array, near: Int64Array, similarity: Float32Array, reached: np.ndarray
) -> dict[tuple[int, int], float]:
    """The cosine of each pair of rows, the lower number first, that reached the threshold."""
    query, column = np.nonzero(reached)
    ends = np.sort(np.stack([rows[query], near[query, column]], axis=1), axis=1)
    return {
        (one, other): cosine for (one, other), cosine in zip(ends.tolist(), similarity[reached].tolist(), strict=True)
    }


def read_duplicates(run: Path) -> Duplicates | None:
    """The pairs that were found in a run, None before the command. Raises ValueError for a damaged file."""
    path = run / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return Duplicates(**content | {"pairs": [(int(a), int(b), float(cosine)) for a, b, cosine in content["pairs"]]})
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not one that 'pic duplicates' wrote: remove it") from None
