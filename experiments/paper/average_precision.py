"""Average precision of detections by the rules of Pascal VOC 2007, at ten overlaps, as Detectron2 computes it.

A detection belongs to the object of its class and image with which it overlaps most. It is correct if their overlap
exceeds the threshold and no detection with a higher score has found that object. One that belongs to a difficult object
is ignored, and difficult objects need not be found. No library has these rules: those of COCO (pycocotools,
torchmetrics) match the best object that is still free, and accept an overlap of exactly the threshold.

Boxes are edges (`experiments.paper.voc`), not first and last pixels: their plain overlap equals that of VOC's
development kit, which adds 1 to each side of a box of pixels.

Detectron2 differs in three details, which change results by rounding only: it rounds scores to three and boxes to one
decimal place before it ranks and matches them, it breaks ties of scores arbitrarily, and it compares recall with
0.1 · i in floating point, so that a recall of exactly 0.3 does not reach the third point. Here ties are in the order of
images, and recall is compared exactly. Detectron2 counts a class without objects as 0; here it has no average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.torchvision_schemas import import_module
from weightserver.core.arrays import Int64Array

THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))
"""Intersection over union that a correct detection exceeds."""
_RECALLS = np.arange(11)
"""Tenths of the objects at which precision is averaged."""

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The objects on an image."""

    labels: Int64Array
    """int64 [n]."""
    boxes: Float64Array
    """Left, top, right and bottom edges: float64 [n, 4]."""
    difficult: NDArray[np.bool_]
    """bool [n]."""


@dataclass(frozen=True, kw_only=True)
class Detections:
    """What a detector found on an image."""

    labels: Int64Array
    """int64 [n]."""
    boxes: Float64Array
    """float64 [n, 4]."""
    scores: Float64Array
    """float64 [n]."""


def average_precision(objects: Sequence[Objects], detections: Sequence[Detections], num_classes: int) -> Float64Array:
    """Percentages of each class at each of THRESHOLDS, of images in order: float64 [num_classes, 10].

    NaN for a class without objects to find.
    """
    overlaps, matches = _best_matches(objects, detections)
    labels, difficult = (np.concatenate([getattr(each, name) for each in objects]) for name in ("labels", "difficult"))
    found_labels, scores = (
        np.concatenate([getattr(each, name) for each in detections]) for name in ("labels", "scores")
    )
    is_ignored = np.append(difficult, False)[matches]  # −1 stands for no object
    by_class = np.full((num_classes, len(THRESHOLDS)), np.nan)
    for label in np.unique(labels[~difficult]):
        found = np.flatnonzero(found_labels == label)
        found = found[np.argsort(-scores[found], kind="stable")]
        num_objects = int((~difficult[labels == label]).sum())
        for column, threshold in enumerate(THRESHOLDS):
            is_matched = overlaps[found] > threshold
            is_correct = _is_first(np.where(is_matched, matches[found], -1))
            counted = ~(is_matched & is_ignored[found])
            by_class[label, column] = 100 * eleven_points(is_correct[counted], num_objects)
    return by_class


def eleven_points(correct: NDArray[np.bool_], num_objects: int) -> float:
    """Mean over recalls of 0, 0.1, …, 1 of the highest precision at that recall or above; 0 where none reaches it.

    Args:
        correct: whether each detection is, highest score first: bool [n].
        num_objects: number of objects to find.
    """
    found = np.cumsum(correct)
    precision = found / np.arange(1, len(found) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]  # of this and all later detections
    first = np.searchsorted(10 * found, _RECALLS * num_objects)  # the first detection with that recall
    return float(np.append(best, 0.0)[first].mean())


def _best_matches(objects: Sequence[Objects], detections: Sequence[Detections]) -> tuple[Float64Array, Int64Array]:
    """Overlap and number of the object of its class that overlaps most with each detection; 0 and −1 without any."""
    box_iou, first = import_module("torchvision.ops").box_iou, 0
    overlaps, matches = [np.zeros(0)], [np.zeros(0, np.int64)]
    for wanted, found in zip(objects, detections, strict=True):
        table = box_iou(torch.from_numpy(found.boxes), torch.from_numpy(wanted.boxes)).numpy()
        table = np.where(found.labels[:, None] == wanted.labels, table, 0.0)
        table = np.append(table, np.zeros((len(found.labels), 1)), axis=1)  # an image may have no objects
        overlaps.append(table.max(axis=1))
        matches.append(np.where(overlaps[-1] > 0, first + table.argmax(axis=1), -1))
        first += len(wanted.labels)
    return np.concatenate(overlaps), np.concatenate(matches)


def _is_first(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks the first occurrence of each value but −1: bool [n]."""
    first = np.zeros(len(values), bool)
    first[np.unique(values, return_index=True)[1]] = True
    return first & (values >= 0)
