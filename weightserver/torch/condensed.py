"""The products of embeddings and rows, condensed to the few numbers of each image that its loss needs.

To the softmax, all classes that are not an image's own are like one class, whose logit is the logarithm of the sum of
their exponentials. That class and the own ones make up a small matrix, of which the loss and its gradients follow as of
the matrix of all classes.

Rows are taken in chunks, whose logits stay in the cache. The backward pass computes them again: on a CPU a fourth
matrix product takes less time than it takes to write all logits to memory and to read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weightserver.torch.threads import in_threads

_FEW_VALUES = 1 << 23
"""Fewer logits, and values of rows, are computed faster at once than in chunks. The memory of more, 32 MiB, is not
reused: glibc returns it to the kernel each time, and the page faults take longer than the products."""
_LOGITS_OF_CHUNK = 1 << 19
"""2 MiB, of which each thread has one chunk at a time; as many values of rows at most."""
_NUM_GROUPS = 16
"""Groups of chunks that threads take in turn; one sum of gradients of the embeddings is held for each."""
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
    columns = torch.arange(1, 1 + own.shape[1], device=own.device).expand_as(own)
    return products, columns.where(own >= 0, -1)


def are_many(features: Tensor, weight: Tensor) -> bool:
    """Whether `condensed` computes the loss faster than the logits of all rows at once."""
    return features.device.type == "cpu" and len(weight) * max(features.shape) >= _FEW_VALUES


class _Condensed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, own: Tensor, temperature: float, cosines: bool) -> Tensor:
        scaled = features / temperature

        def of_chunks(chunks: list[_Chunk]) -> list[tuple[_Chunk, Tensor, Tensor]]:
            """Each with the logits of own rows, (m,), and of the others the logarithm of the sum of exponentials."""
            found = []
            for chunk in chunks:
                rows, _ = chunk.rows(weight, cosines)
                logits = scaled @ rows.T  # (B, n)
                of_own = logits[chunk.images, chunk.own]
                logits[chunk.images, chunk.own] = -math.inf
                found.append((chunk, of_own, logits.logsumexp(dim=1)))
            return found

        logits = features.new_full((len(own), 1 + own.shape[1]), -math.inf)  # the result, divided by the temperature
        sums = [logits[:, 0]]
        for chunk, of_own, of_others in chain.from_iterable(in_threads(of_chunks, _groups(weight, own))):
            logits[chunk.images, chunk.columns] = of_own
            sums.append(of_others)
        logits[:, 0] = torch.stack(sums).logsumexp(dim=0)
        ctx.save_for_backward(features, weight, own, logits[:, :1])
        ctx.temperature, ctx.cosines = temperature, cosines
        return logits * temperature

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        features, weight, own, total = ctx.saved_tensors
        needs_features, needs_weight, *_ = ctx.needs_input_grad
        scaled = features / ctx.temperature
        of_weight = torch.empty_like(weight) if needs_weight else None

        def of_chunks(chunks: list[_Chunk]) -> Tensor:
            """Sets the rows' gradients; returns those of the features, through these rows."""
            of_features = torch.zeros_like(features)
            for chunk in chunks:
                rows, lengths = chunk.rows(weight, ctx.cosines)
                slopes = (scaled @ rows.T).sub_(total).exp_().mul_(gradient[:, :1])  # dLoss/dproducts, (B, n)
                slopes[chunk.images, chunk.own] = gradient[chunk.images, chunk.columns]
                if needs_features:
                    of_features.addmm_(slopes, rows)
                if of_weight is not None:
                    of_rows = slopes.T @ features
                    if lengths is not None:
                        along = (of_rows * rows).sum(dim=1, keepdim=True)
                        of_rows.addcmul_(rows, along, value=-1).div_(lengths)
                    of_weight[chunk.place] = of_rows
            return of_features

        of_features = torch.zeros_like(features)
        with torch.autocast(features.device.type, enabled=False):
            for of_group in in_threads(of_chunks, _groups(weight, own)):
                of_features += of_group
        return of_features if needs_features else None, of_weight, None, None, None


@dataclass(frozen=True)
class _Chunk:
    """Some n rows, and which of them are own rows of images: of m pairs, the image, and where its own row is."""

    place: slice
    images: Tensor
    """Int64 (m,)."""
    own: Tensor
    """Int64 (m,), positions in the chunk."""
    columns: Tensor
    """Int64 (m,), columns of the result."""

    def rows(self, weight: Tensor, cosines: bool) -> tuple[Tensor, Tensor | None]:
        """The rows (n, D), of length 1 if `cosines`, and the lengths (n, 1) by which they were divided."""
        rows = weight[self.place]
        if not cosines:
            return rows, None
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(_SHORTEST)
        return rows / lengths, lengths


def _groups(weight: Tensor, own: Tensor) -> list[list[_Chunk]]:
    """All rows in chunks, and these in groups of about the same size."""
    (batch_size, num_own), (num_rows, dim) = own.shape, weight.shape
    fitting = _LOGITS_OF_CHUNK // max(batch_size, dim)
    size = max(_ROWS_OF_PRODUCT, fitting // _ROWS_OF_PRODUCT * _ROWS_OF_PRODUCT)
    starts = range(0, num_rows, size)
    ordered, pairs = own.flatten().sort()  # those of no row first
    bounds = torch.searchsorted(ordered, torch.tensor([*starts, num_rows], device=own.device)).tolist()
    chunks = []
    for start, first, end in zip(starts, bounds, bounds[1:], strict=False):
        of_chunk = pairs[first:end]
        place, images, columns = slice(start, start + size), of_chunk // num_own, 1 + of_chunk % num_own
        chunks.append(_Chunk(place, images=images, own=ordered[first:end] - start, columns=columns))
    return [chunks[first::_NUM_GROUPS] for first in range(min(_NUM_GROUPS, len(chunks)))]
