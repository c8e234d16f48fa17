"""The products of embeddings and rows, condensed to the few numbers of each image that its loss needs.

To the softmax, all classes that are not an image's own are like one class, whose logit is the logarithm of the sum of
their exponentials. That class and the own ones make up a small matrix, of which the loss and its gradients follow as of
the matrix of all classes.

Rows are taken in chunks, whose logits stay in the cache. The backward pass computes them again: on a CPU a fourth
matrix product takes less time than it takes to write all logits to memory and to read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_FEW_LOGITS = 1 << 23
"""So many logits, 32 MiB, are computed faster at once than in chunks. The memory of more is not reused: glibc returns
it to the kernel each time, and the page faults take longer than the products."""
_LOGITS_OF_CHUNK = 1 << 20
"""For each thread, 4 MiB. Fewer are not faster, but threads wait for each other more often."""
_ROWS_OF_PRODUCT = 64
"""A chunk has a multiple of this many rows; products of fewer are slow."""
_SHORTEST = 1e-12
"""That of torch.nn.functional.normalize: shorter rows are divided by it instead of their length."""


def condensed(
    features: Tensor, weight: Tensor, own: Tensor, *, temperature: float, cosines: bool
) -> tuple[Tensor, Tensor]:
    """Products p of which softmax(p / temperature) gives own classes their probabilities among all classes.

    Args:
        features: (B, D), of length 1 if `cosines`.
        weight: (K, D), of the same dtype; its rows are L2-normalised here if `cosines`.
        own: int64 (B, P), positions of each image's own rows, distinct; -1 for fewer.

    Returns:
        (B, 1 + P): temperature · log Σ exp(w_j·z_i / temperature) over all rows j but the own ones, then the products
        of the own ones; -∞ where there are none.
        Int64 (B, P): the columns of the own ones, -1 for fewer.

    Raises:
        IndexError: an own row that does not exist.
    """
    if own.numel() and (largest := int(own.max())) >= len(weight):
        raise IndexError(f"label {largest} is out of bounds: there are {len(weight)} rows")
    products: Tensor = _Condensed.apply(features, weight, own, temperature, cosines)  # type: ignore[no-untyped-call]
    columns = torch.arange(1, 1 + own.shape[1]).expand_as(own)
    return products, columns.where(own >= 0, -1)


def are_many(features: Tensor, weight: Tensor) -> bool:
    """Whether `condensed` computes the loss faster than the logits of all rows at once."""
    return features.device.type == "cpu" and len(features) * len(weight) > _FEW_LOGITS


class _Condensed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, own: Tensor, temperature: float, cosines: bool) -> Tensor:
        scaled = features / temperature
        logits = features.new_full((len(own), 1 + own.shape[1]), -math.inf)  # the result, divided by the temperature
        sums = [logits[:, 0]]  # of each chunk, the logarithm of the sum of exponentials
        for chunk in _chunks(weight, own, cosines):
            of_chunk = scaled @ chunk.rows.T  # (B, n)
            logits[chunk.images, chunk.columns] = of_chunk[chunk.images, chunk.own]
            of_chunk[chunk.images, chunk.own] = -math.inf
            sums.append(of_chunk.logsumexp(dim=1))
        logits[:, 0] = torch.stack(sums).logsumexp(dim=0)
        ctx.save_for_backward(features, weight, own, logits[:, :1])
        ctx.temperature, ctx.cosines = temperature, cosines
        return logits * temperature

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        features, weight, own, total = ctx.saved_tensors
        scaled = features / ctx.temperature
        of_features = torch.zeros_like(features) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(features.device.type, enabled=False):
            for chunk in _chunks(weight, own, ctx.cosines):
                slopes = (scaled @ chunk.rows.T).sub_(total).exp_().mul_(gradient[:, :1])  # dLoss/dproducts, (B, n)
                slopes[chunk.images, chunk.own] = gradient[chunk.images, chunk.columns]
                if of_features is not None:
                    of_features.addmm_(slopes, chunk.rows)
                if of_weight is not None:
                    of_weight[chunk.place] = chunk.of_weight(slopes.T @ features)
        return of_features, of_weight, None, None, None


@dataclass(frozen=True)
class _Chunk:
    """Some n rows, and which of them are own rows of images: of m pairs, the image, and where its own row is."""

    place: slice
    """Of the rows in weight."""
    rows: Tensor
    """(n, D), of length 1 if logits are cosines."""
    lengths: Tensor | None
    """(n, 1), by which the rows were divided; None if they were not."""
    images: Tensor
    """Int64 (m,)."""
    own: Tensor
    """Int64 (m,), positions in `rows`."""
    columns: Tensor
    """Int64 (m,), columns of the result."""

    def of_weight(self, gradients: Tensor) -> Tensor:
        """The gradients of the rows of weight, of those of `rows`; overwrites them."""
        if self.lengths is None:
            return gradients
        along = (gradients * self.rows).sum(dim=1, keepdim=True)
        return gradients.addcmul_(self.rows, along, value=-1).div_(self.lengths)


def _chunks(weight: Tensor, own: Tensor, cosines: bool) -> Iterator[_Chunk]:
    """All rows in order, some at a time."""
    batch_size, num_own = own.shape
    size = torch.get_num_threads() * _LOGITS_OF_CHUNK // max(1, batch_size)
    size = max(_ROWS_OF_PRODUCT, size // _ROWS_OF_PRODUCT * _ROWS_OF_PRODUCT)
    starts = range(0, len(weight), size)
    ordered, pairs = own.flatten().sort()  # those of no row first
    bounds = torch.searchsorted(ordered, torch.tensor([*starts, len(weight)])).tolist()
    for start, first, end in zip(starts, bounds, bounds[1:], strict=False):
        rows, lengths = weight[start : start + size], None
        if cosines:
            lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(_SHORTEST)
            rows = rows / lengths
        of_chunk = pairs[first:end]
        yield _Chunk(
            place=slice(start, start + size),
            rows=rows,
            lengths=lengths,
            images=of_chunk // num_own,
            own=ordered[first:end] - start,
            columns=1 + of_chunk % num_own,
        )
