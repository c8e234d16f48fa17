"""Checks of what a training loop gives a head."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

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


class Doing(IntEnum):
    """What a rank does in a step when it exchanges something with the others."""

    ANNOUNCES = 0
    HAS_NONE = 1
    REPEATS = 2
    ENDS = 3
    SKIPS = 4


_WORDS = ("announces", "has no batch for", "repeats", "ends", "skips")
_MOST_VALUES = 6


def exchanged(ranks: Ranks, doing: Doing, step: int, attempt: int, values: Sequence[float] = ()) -> list[float]:
    """The largest of each of up to 6 values over ranks, which all do the same in the same attempt at the same step.

    Raises:
        ValueError: on all of them, if one does something else, as when an attempt has failed on one rank alone.
    """
    if ranks.world_size == 1:
        return list(values)
    place = (step << 16 | min(attempt, (1 << 16) - 1)) << 3 | doing  # exact as a float64 up to step 2³⁴
    most, least, *found = ranks.max_over_ranks([place, -place, *values, *[0.0] * (_MOST_VALUES - len(values))])
    if most == -least:
        return found[: len(values)]
    others = [_Place.of(int(most)), _Place.of(int(-least))]
    if [(other.step, other.doing) for other in others] == [(step, Doing.HAS_NONE), (step, Doing.ANNOUNCES)]:
        whose = "this rank have ended before those of another" if doing else "another rank have ended before this one's"
        raise ValueError(
            f"the batches of {whose}: give every rank as many (drop_last=True in the DataLoader and in its "
            "DistributedSampler)"
        )
    here, (there, *_) = _Place(step, attempt, doing), [other for other in others if other != (step, attempt, doing)]
    raise ValueError(
        f"this rank {here.phrase}, another one {there.phrase}: a step that fails on one rank must be repeated, skipped "
        "or left out on all of them"
    )


class _Place(NamedTuple):
    """Where a rank is."""

    step: int
    attempt: int
    doing: int

    @classmethod
    def of(cls, number: int) -> _Place:
        return cls(number >> 19, number >> 3 & (1 << 16) - 1, number & 7)

    @property
    def phrase(self) -> str:
        return f"{_WORDS[self.doing]} step {self.step} after {self.attempt} failed attempts"


def ids_of_all_ranks(batches: list[Int64Array], ranks: Ranks, *, step: int, attempt: int) -> Int64Array:
    """The classes of every rank, in order: A times int64 (b,) or (b, P) to (A, B) or (A, B, P). All ranks call it.

    Raises:
        ValueError: the batches are of several sizes, or not as many and of one size on all ranks.
    """
    number, sizes = len(batches), [len(batch) for batch in batches]  # A, b
    places = [batch.size // len(batch) for batch in batches]  # P
    own = [max(sizes), -min(sizes), number, -number, max(places), -min(places)]
    most, least, most_batches, least_batches, most_places, least_places = exchanged(
        ranks, Doing.ANNOUNCES, step, attempt, own
    )
    if most != -least:
        raise ValueError(
            f"the batches of a step must be equally large, on every rank, got {-least:.0f} to {most:.0f} classes: "
            "leave out the last batch (drop_last=True), also on the rank whose loader has the fewest"
        )
    if most_batches != -least_batches:
        raise ValueError(
            f"a step must have as many batches on every rank, got {-least_batches:.0f} to {most_batches:.0f}: give "
            "every rank the same batches_per_step"
        )
    if most_places != -least_places or len({batch.ndim for batch in batches}) > 1:
        raise ValueError(
            "the batches of a step must have places for as many classes an image, on every rank, got "
            f"{-least_places:.0f} to {most_places:.0f}: fill with -1"
        )
    ids = torch.from_numpy(np.stack(batches))
    return gathered(ids, ids.shape[1] * ranks.world_size, ranks, dim=1).numpy()


def first_of(ids: Int64Array) -> str:
    """The first classes, for a message."""
    return ", ".join(map(str, ids[:4].tolist())) + (", ..." if len(ids) > 4 else "")
