"""Average precision of detections by the rules of Pascal VOC 2007, at ten overlaps, as Detectron2 computes it.

A detection belongs to the object of its class and image with which it overlaps most. It is correct if the intersection
over union exceeds the threshold and no detection with a higher score has found that object; otherwise it is false. One
that belongs to a difficult object by more than the threshold is ignored, and difficult objects need not be found.

Boxes are edges (`trainer.evaluate.detection.voc`), not first and last pixels: their plain overlap equals that of VOC's
development kit, which adds 1 to each side of a box of pixels.

Detectron2 differs in three details, which change results by rounding only: it rounds scores to three and boxes to one
decimal place before it ranks and matches them, it breaks ties of scores arbitrarily, and it compares recall with
0.1 · i in floating point, so that a recall of exactly 0.3 does not reach the third point. Here ties are in the order of
images, and recall is compared exactly. Detectron2 counts a class without objects as 0; here it has no average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightserver.core.arrays import Int64Array

THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))
"""Intersection over union that a correct detection exceeds."""
_RECALLS = np.arange(11)
"""Tenths of the objects at which precision is averaged."""

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """n boxes on images."""

    images: Int64Array
    """Number of the image: int64 [n]."""
    labels: Int64Array
    """int64 [n]."""
    boxes: Float64Array
    """Left, top, right and bottom edges: float64 [n, 4]."""


@dataclass(frozen=True, kw_only=True)
class Objects(Boxes):
    """The objects on the images."""

    difficult: NDArray[np.bool_]
    """bool [n]."""


@dataclass(frozen=True, kw_only=True)
class Detections(Boxes):
    """What a detector found."""

    scores: Float64Array
    """float64 [n]."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Average precisions in percent."""

    by_class: Float64Array
    """Of each class at each of THRESHOLDS: float64 [classes, 10]; NaN for a class without objects to find."""

    def at(self, threshold: float) -> float:
        """Mean over classes at one of THRESHOLDS; NaN if there are no objects at all."""
        return self._mean(self.by_class[:, THRESHOLDS.index(threshold)])

    @property
    def mean(self) -> float:
        """Mean over classes and THRESHOLDS, which papers call AP."""
        return self._mean(self.by_class)

    @staticmethod
    def _mean(values: Float64Array) -> float:
        known = values[~np.isnan(values)]
        return float(known.mean()) if known.size else float("nan")


def average_precision(objects: Objects, detections: Detections, num_classes: int) -> Precision:
    """Average precision of each class at each of THRESHOLDS."""
    by_class = np.full((num_classes, len(THRESHOLDS)), np.nan)
    for label in range(num_classes):
        wanted = objects.labels == label
        difficult = objects.difficult[wanted]
        found = np.flatnonzero(detections.labels == label)
        found = found[np.argsort(-detections.scores[found], kind="stable")]
        overlaps, matches = _best_matches(
            objects.images[wanted], objects.boxes[wanted], detections.images[found], detections.boxes[found]
        )
        is_ignored = np.append(difficult, False)[matches]  # −1 stands for no object
        for column, threshold in enumerate(THRESHOLDS if not difficult.all() else ()):
            is_matched = overlaps > threshold
            is_correct = _is_first(np.where(is_matched, matches, -1))
            counted = ~(is_matched & is_ignored)
            by_class[label, column] = 100 * eleven_points(is_correct[counted], int((~difficult).sum()))
    return Precision(by_class=by_class)


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


def _best_matches(
    object_images: Int64Array, object_boxes: Float64Array, images: Int64Array, boxes: Float64Array
) -> tuple[Float64Array, Int64Array]:
    """Overlap and index of the object that overlaps most with each detection: [n], [n]; 0 and −1 without any."""
    overlaps, matches = np.zeros(len(images)), np.full(len(images), -1)
    by_image = np.argsort(images, kind="stable")
    for group in np.split(by_image, np.flatnonzero(np.diff(images[by_image])) + 1):
        if not len(group):
            continue
        candidates = np.flatnonzero(object_images == images[group[0]])
        if len(candidates):
            table = intersection_over_union(boxes[group], object_boxes[candidates])
            overlaps[group] = table.max(axis=1)
            matches[group] = candidates[table.argmax(axis=1)]
    return overlaps, matches


def intersection_over_union(first: Float64Array, second: Float64Array) -> Float64Array:
    """Of each of n boxes with each of m: float64 [n, 4] and [m, 4] to [n, m]."""
    first, second = first[:, None], second[None]
    sides = np.minimum(first[..., 2:], second[..., 2:]) - np.maximum(first[..., :2], second[..., :2])
    intersection = sides.clip(min=0).prod(axis=-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(axis=-1) for boxes in (first, second)]
    shares: Float64Array = intersection / np.maximum(areas[0] + areas[1] - intersection, np.finfo(float).tiny)
    return shares


def _is_first(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks the first occurrence of each value but −1: bool [n]."""
    first = np.zeros(len(values), bool)
    first[np.unique(values, return_index=True)[1]] = True
    return first & (values >= 0)
