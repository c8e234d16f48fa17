"""Checks of what a training loop gives a head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightserver.core.arrays import Int64Array
from weightserver.torch.ranks import Ranks, gathered


def checked_ids(ids: Any, num_classes: int) -> Int64Array:
    """Classes as int64 (b,), or (b, P) for several classes of an image.

    Raises:
        TypeError: they are not integers.
        ValueError: another shape, one-hot targets, or classes outside 0..num_classes−1; of several, -1 stands for none,
            but not alone.
    """
    if isinstance(ids, Tensor) and ids.is_floating_point():  # NumPy has no bfloat16
        raise TypeError(f"classes must be integers, got {ids.dtype}")
    array = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if array.ndim not in (1, 2) or not array.size:
        raise ValueError(f"classes must have shape (b,), or (b, P) for several of an image, got {tuple(array.shape)}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"classes must be integers, got {array.dtype}")
    least = 0 if array.ndim == 1 else -1
    if array.min() < least or array.max() >= num_classes:
        bad = array[(array < least) | (array >= num_classes)][0]
        raise ValueError(f"class {bad} does not exist: the head has classes 0..{num_classes - 1}")
    if array.ndim == 2 and len(without := np.flatnonzero(array.max(axis=1) < 0)):
        raise ValueError(f"image {without[0]} of the batch has no class: give each at least one")
    if array.shape[1:] == (num_classes,) and num_classes > 2 and array.min() >= 0 and array.max() <= 1:
        raise ValueError("classes look one-hot, but are given as their numbers: give targets.argmax(1)")
    return array.astype(np.int64, copy=False)


def check_embeddings(embeddings: Any, num_ids: int, dim: int, device: torch.device) -> None:
    """Raises unless embeddings are floats (num_ids, dim) on `device`.

    Raises:
        TypeError: they are no tensor of floats.
        ValueError: another shape or device.
    """
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point():
        raise TypeError(
            f"embeddings must be a tensor of floats, got {getattr(embeddings, 'dtype', type(embeddings).__name__)}"
        )
    if tuple(embeddings.shape) != (num_ids, dim):
        raise ValueError(
            f"embeddings must have shape ({num_ids}, {dim}), one row for each class given, got "
            f"{tuple(embeddings.shape)}"
        )
    if embeddings.device != device:
        raise ValueError(
            f"embeddings are on {embeddings.device}, the head is on {device}: call head.to() before its first use"
        )


def ids_of_all_ranks(batches: list[Int64Array], ranks: Ranks) -> Int64Array:
    """The classes of every rank, in order: A times int64 (b,) or (b, P) to (A, B) or (A, B, P). All ranks call it.

    Raises:
        ValueError: the batches are of several sizes, or not as many and of one size on all ranks.
    """
    number, sizes = len(batches), [len(batch) for batch in batches]  # A, b
    places = [batch.size // len(batch) for batch in batches]  # P
    most, least, most_batches, least_batches, most_places, least_places = ranks.max_over_ranks(
        [max(sizes), -min(sizes), number, -number, max(places), -min(places)]
    )
    if most != -least:
        raise ValueError(
            f"the batches of a step must be equally large, on every rank, got {abs(least):.0f} to {most:.0f} classes: "
            "leave out the last batch (drop_last=True), also on the rank whose loader has the fewest"
        )
    if most_batches != -least_batches:
        raise ValueError(
            f"a step must have as many batches on every rank, got {abs(least_batches):.0f} to {most_batches:.0f}: give "
            "every rank the same batches_per_step"
        )
    if most_places != -least_places or len({batch.ndim for batch in batches}) > 1:
        raise ValueError(
            "the batches of a step must have places for as many classes an image, on every rank, got "
            f"{-least_places:.0f} to {most_places:.0f}: fill with -1"
        )
    ids = torch.from_numpy(np.stack(batches))
    return gathered(ids, ids.shape[1] * ranks.world_size, ranks, dim=1).numpy()


def check_ended_everywhere(ranks: Ranks) -> None:
    """Raises ValueError unless all other ranks call this too, and none calls `ids_of_all_ranks` instead."""
    most, *_ = ranks.max_over_ranks([0] * 6)
    if most:
        raise ValueError(
            "the batches of this rank have ended before those of another: give every rank as many (drop_last=True in "
            "the DataLoader and in its DistributedSampler)"
        )


def first_of(ids: Int64Array) -> str:
    """The first classes, for a message."""
    return ", ".join(map(str, ids[:4].tolist())) + (", ..." if len(ids) > 4 else "")
