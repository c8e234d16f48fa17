"""Rows that begin at the embedding of their class's first image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from weightserver.core.arrays import Int64Array
from weightserver.torch.ranks import Ranks, gathered
from weightserver.torch.rows.store import Begun


class Beginnings:
    """The rows of a step that no update has reached, and where those begin whose class has an image in its batches.

    Args:
        fresh: bool (K of this rank,), which of the active rows no update has reached.
        norm: length of a row when it begins.
    """

    def __init__(self, fresh: npt.NDArray[np.bool_], norm: float) -> None:
        self._fresh = fresh
        self._norm = norm
        self.of_batches: dict[int, Begun] = {}
        """What each batch begins: positions, int64 (n,), and what is added to the active rows there, (n, D)."""

    def add(self, batch: int, embeddings: Tensor, weight: Tensor, labels: Int64Array, ranks: Ranks) -> None:
        """Begins the fresh classes of a batch that no earlier one, or view of it, has begun; of several images of a
        class the first one counts.

        A class begins at random if that embedding has no direction: zeros, infinite or NaN, as in a step that
        overflowed and is skipped.

        Args:
            embeddings: float (b, D), of this rank's images.
            weight: float32 (K of this rank, D), the active rows as they are without a beginning.
            labels: int64 (B,) or (B, P), of all ranks' images, positions in `weight`; -1 for classes of other ranks.
        """
        if batch in self.of_batches:
            return
        whole = gathered(embeddings.float(), len(labels), ranks)  # (B, D); all ranks call it
        begins = self._fresh.copy()
        begins[self._all()[0]] = False
        positions, first = np.unique(labels, return_index=True)
        positions, first = positions[positions >= 0], first[positions >= 0] // (labels.size // len(labels))  # the image
        positions, first = positions[begins[positions]], first[begins[positions]]
        directions = F.normalize(whole[torch.from_numpy(first).to(whole.device)])
        has_direction = directions.norm(dim=1, keepdim=True) > 0.5  # about 1, unless it is 0 or NaN
        before = weight.detach()[torch.from_numpy(positions).to(weight.device)]
        self.of_batches[batch] = positions, torch.where(has_direction, self._norm * directions - before, 0.0)

    def _all(self) -> Begun:
        positions, added = zip((np.zeros(0, np.int64), torch.zeros(0)), *self.of_batches.values(), strict=True)
        return np.concatenate(positions), torch.cat(added[1:] or added)

    def rows(self, weight: Tensor) -> Tensor:
        """The active rows with those that have begun; their gradient is that of `weight`."""
        positions, added = self._all()
        if not len(positions):
            return weight
        chosen = torch.from_numpy(positions).to(weight.device)
        return weight + torch.zeros_like(weight, requires_grad=False).index_put_((chosen,), added)

    def begun(self, weight: Tensor) -> Begun:
        """The positions of the rows that have begun, int64 (n,), and their values, float32 (n, D)."""
        positions, _ = self._all()
        return positions, self.rows(weight.detach())[torch.from_numpy(positions).to(weight.device)]
