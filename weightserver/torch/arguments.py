"""Checks of what a training loop gives a head."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightserver.core.arrays import Int64Array, checked_integer


def checked_ids(ids: Any, num_classes: int, *, may_be_none: bool = False) -> Int64Array:
    """Classes as int64 (b,), or (b, P) for several classes of an image; of no image, where there may be none, (0, 1).

    Raises:
        TypeError: they are not integers.
        ValueError: another shape, one-hot targets, or classes outside 0..num_classes−1; of several, -1 stands for none,
            but not alone.
    """
    if isinstance(ids, Tensor) and ids.is_floating_point():  # NumPy has no bfloat16
        raise TypeError(f"classes must be integers, got {ids.dtype}")
    array = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if may_be_none and array.shape[:1] == (0,):
        return np.zeros((0, 1), np.int64)
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


def class_counts(given: Any) -> list[int]:
    """The numbers of classes that were added one after another, of an integer or a list, array or tensor of them.

    Raises:
        TypeError: they are not integers.
        ValueError: one is not positive, or there is none.
    """
    is_list = isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 1
    counts = [checked_integer(number, "num_classes", 1) for number in (given if is_list else [given])]
    if not counts:
        raise ValueError("num_classes must be an integer or a list of integers, got an empty list")
    return counts


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


def check_finite(embeddings: Tensor) -> None:
    """Raises ValueError if a value of embeddings (b, D) is infinite or NaN."""
    if len(bad := (~embeddings.isfinite().all(dim=1)).nonzero()):
        raise ValueError(
            f"the embedding of image {int(bad[0])} is infinite or NaN: look for the step in which the encoder "
            "diverged, and load a state from before"
        )


def first_of(ids: Int64Array) -> str:
    """The first classes, for a message."""
    return ", ".join(map(str, ids[:4].tolist())) + (", ..." if len(ids) > 4 else "")
