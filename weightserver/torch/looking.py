"""Compares embeddings with any number of classes, whose rows are read block by block; changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weightserver.common.background import computed_ahead
from weightserver.core.arrays import Int64Array
from weightserver.torch.agreement import Agreement
from weightserver.torch.loss import Loss
from weightserver.torch.ranks import gathered_parts
from weightserver.torch.table import Table

_ROWS_AT_A_TIME = 1 << 14
"""Rows of this rank that are read together: 8 MiB of 128 values each."""
_LOGITS_AT_A_TIME = 1 << 23
"""32 MiB."""


class Evaluation(NamedTuple):
    """What `ClassifierHead.evaluate` finds: means over the images of all ranks."""

    loss: float
    """Cross-entropy of the softmax over the classes, without a margin."""
    top1: float
    """Share of the images whose nearest class is their own, or one of their own."""
    top5: float
    """Share of the images with an own class among the five nearest."""


class Compared(NamedTuple):
    """Embeddings compared with classes; B images of all ranks."""

    mine: slice
    """Positions of this rank's images in the batch."""
    nearest: Int64Array
    """Rows (B, k) with the largest logits, in descending order."""
    log_sum: Tensor
    """The logarithm of the sum of the logits' exponentials, (B,)."""
    of_own: Tensor
    """The logits of own rows (B, P), -∞ for none."""


@dataclass(frozen=True)
class Comparison:
    """The classes that embeddings are compared with: some rows, of which this rank reads its share."""

    table: Table
    loss: Loss
    read: Callable[[Int64Array], Tensor]
    """Returns rows of this rank's share, int64 (n,): float32 (n, D), on the device."""
    rows: Int64Array | None
    """Strictly increasing int64 (n,), the same on every rank; all of the table if None."""
    agreement: Agreement
    """The agreement of the ranks that read the rows."""

    @property
    def num_classes(self) -> int:
        return self.table.spec.num_rows if self.rows is None else len(self.rows)

    def compare(self, embeddings: Tensor, own: Int64Array | None = None, *, k: int) -> Compared:
        """Compares the embeddings, float (b, D), of all ranks; all ranks call it, each with any number of its own.

        Args:
            own: the own rows of all ranks' images, int64 (B, P); -1 for none.
            k: number of nearest rows to find; at most `num_classes`.
        """
        ranks, device = self.table.ranks, self.table.ranks.device
        with torch.autocast(device.type, enabled=False):
            features = embeddings.float()
            features = F.normalize(features) if self.loss.cosines else features
            parts = gathered_parts(features, ranks)
            first = sum(map(len, parts[: ranks.rank]))
            features = torch.cat(parts) / self.loss.divisor  # (B, D)
            own = np.zeros((len(features), 0), np.int64) if own is None else own
            images = torch.arange(len(features), device=device)
            best = features.new_full((len(features), k), -math.inf)
            nearest = torch.zeros(best.shape, dtype=torch.int64, device=device)
            log_sum = features.new_full((len(features),), -math.inf)
            of_own = features.new_full(own.shape, -math.inf)
            with self.agreement, closing(computed_ahead(self._shares(), ahead=1, name="rows-to-compare")) as shares:
                for rows, weight in shares:
                    weight = F.normalize(weight) if self.loss.cosines else weight
                    position = np.searchsorted(rows, own).clip(max=len(rows) - 1)
                    image, column = np.nonzero(rows[position] == own)
                    pair = torch.from_numpy(np.stack([image, column, position[image, column]])).to(device)
                    of_own[pair[0], pair[1]] = (features[pair[0]] * weight[pair[2]]).sum(dim=1)
                    numbers = torch.from_numpy(rows).to(device)
                    for part in torch.split(images, _LOGITS_AT_A_TIME // len(rows)):
                        logits = features[part] @ weight.T  # (images, rows)
                        log_sum[part] = torch.logaddexp(log_sum[part], logits.logsumexp(dim=1))
                        found, place = logits.topk(min(k, len(rows)), dim=1)
                        best[part], nearest[part] = _best(
                            torch.cat([best[part], found], dim=1), torch.cat([nearest[part], numbers[place]], dim=1), k
                        )
            of_ranks = [gathered_parts(found[None], ranks) for found in (best, nearest, log_sum, of_own)]
            _, nearest = _best(torch.cat(of_ranks[0], dim=2)[0], torch.cat(of_ranks[1], dim=2)[0], k)
            log_sum, of_own = torch.cat(of_ranks[2]).logsumexp(dim=0), torch.cat(of_ranks[3]).amax(dim=0)
        return Compared(slice(first, first + len(embeddings)), nearest.cpu().numpy(), log_sum, of_own)

    def _shares(self) -> Iterator[tuple[Int64Array, Tensor]]:
        """This rank's rows, some at a time, with their values."""
        at_a_time = _ROWS_AT_A_TIME * self.table.ranks.world_size
        for start in range(0, self.num_classes, at_a_time):
            stop = min(self.num_classes, start + at_a_time)
            rows = np.arange(start, stop) if self.rows is None else self.rows[start:stop]
            rows = self.table.owners.mine(rows)
            if len(rows):
                yield rows, self.read(rows)


def _best(values: Tensor, numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each image, in descending order, and their numbers."""
    best, place = values.topk(k, dim=1)
    return best, numbers.gather(1, place)


def evaluation_of(compared: Compared, own: Int64Array) -> Evaluation:
    """The means over all images, of which `own` are the own rows, int64 (B, P), -1 for none."""
    is_own = torch.from_numpy(own >= 0).to(compared.of_own.device)
    mean_own = compared.of_own.masked_fill(~is_own, 0.0).sum(dim=1) / is_own.sum(dim=1)
    hits = (compared.nearest[:, :, None] == own[:, None, :]).any(axis=2)  # (B, k)
    return Evaluation(
        (compared.log_sum - mean_own).mean().item(),
        float(hits[:, :1].any(axis=1).mean()),
        float(hits.any(axis=1).mean()),
    )
