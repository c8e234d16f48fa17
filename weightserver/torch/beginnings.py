"""Rows that begin at the embedding of their class's first image."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from weightserver import TableSpec
from weightserver.core.arrays import Int64Array
from weightserver.torch.ranks import Ranks, gathered


class Beginnings:
    """The rows of a step that no update has reached, and where those begin whose class has an image in its batches.

    Args:
        fresh: bool (K of this rank,), which of the active rows no update has reached.
        norm: length of a row when it begins.
    """

    def __init__(self, fresh: npt.NDArray[np.bool_], norm: float) -> None:
        self._fresh = fresh
        self._norm = norm
        self._positions = np.zeros(0, np.int64)
        self._change: Tensor | None = None  # (K of this rank, D), what is added to the active rows

    def add(self, embeddings: Tensor, weight: Tensor, labels: Int64Array, ranks: Ranks) -> None:
        """Begins the fresh classes of one batch; of several images of a class the first one counts.

        A class begins at random if that embedding has no direction: zeros, infinite or NaN, as in a step that
        overflowed and is skipped.

        Args:
            embeddings: float (b, D), of this rank's images.
            weight: float32 (K of this rank, D), the active rows as they are without a beginning.
            labels: int64 (B,) or (B, P), of all ranks' images, positions in `weight`; -1 for classes of other ranks.
        """
        whole = gathered(embeddings.float(), len(labels), ranks)  # (B, D); all ranks call it
        known = np.isin(np.arange(len(self._fresh)), self._positions)
        positions, first = np.unique(labels, return_index=True)
        positions, first = positions[positions >= 0], first[positions >= 0] // (labels.size // len(labels))  # the image
        begins = (self._fresh & ~known)[positions]
        if not begins.any():
            return
        chosen = torch.from_numpy(positions[begins]).to(weight.device)
        directions = F.normalize(whole[torch.from_numpy(first[begins]).to(whole.device)])
        has_direction = directions.norm(dim=1, keepdim=True) > 0.5  # about 1, unless it is 0 or NaN
        if self._change is None:
            self._change = torch.zeros_like(weight, requires_grad=False)
        else:
            self._change = self._change.clone()  # an earlier batch's graph may hold it
        self._change[chosen] = torch.where(has_direction, self._norm * directions - weight.detach()[chosen], 0.0)
        self._positions = np.append(self._positions, positions[begins])

    def begun(self, weight: Tensor) -> Tensor:
        """The active rows with those that have begun; their gradient is that of `weight`."""
        return weight if self._change is None else weight + self._change

    def of(self, weight: Tensor) -> tuple[Int64Array, Tensor]:
        """The positions of the rows that have begun, int64 (n,), and their values, float32 (n, D)."""
        chosen = torch.from_numpy(self._positions).to(weight.device)
        return self._positions, self.begun(weight)[chosen]


def beginning_norm(spec: TableSpec, init_norm: float | None) -> float:
    """The length that was asked for, by default the root mean square length of random rows.

    Raises:
        ValueError: it is not positive.
    """
    norm = spec.init_std * math.sqrt(spec.dim) if init_norm is None else init_norm
    if not 0 < norm < math.inf:
        raise ValueError(f"a row cannot begin at an embedding with length {norm}: give a positive init_norm")
    return norm


def norm_of(init: str, spec: TableSpec, init_norm: float | None, rows: str) -> float | None:
    """The length of rows that begin at embeddings; None if they begin at random.

    Raises:
        ValueError: an unknown `init`, a length for rows that begin at random, or a row store that it cannot have.
    """
    if init not in ("random", "embedding"):
        raise ValueError(f"init must be 'random' or 'embedding', got {init!r}")
    if init == "random":
        if init_norm is not None:
            raise ValueError(
                "init_norm is the length of rows that begin at embeddings: omit it, or use init='embedding'"
            )
        return None
    if rows == "remote":
        raise ValueError("rows='remote' begin on the servers, which see no embeddings: use rows='resident'")
    return beginning_norm(spec, init_norm)
