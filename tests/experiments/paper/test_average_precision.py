"""Average precision: against VOC's rules, detection by detection, in pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from experiments.paper.average_precision import THRESHOLDS, Detections, Objects, average_precision, eleven_points

NUM_CLASSES, NUM_IMAGES = 3, 3
SIDES = st.integers(1, 10)
BOXES = st.builds(lambda x, y, w, h: (x, y, x + w, y + h), st.integers(0, 4), st.integers(0, 4), SIDES, SIDES)
PLACES = (st.integers(0, NUM_IMAGES - 1), st.integers(0, NUM_CLASSES - 1), BOXES)
OBJECTS = st.lists(st.tuples(*PLACES, st.booleans()), max_size=8)
DETECTIONS = st.lists(st.tuples(*PLACES, st.sampled_from([0.1, 0.5, 0.9])), max_size=14)
"""On a coarse grid, so that equal boxes, overlaps of exactly a threshold, and ties are frequent."""


@pytest.mark.parametrize(
    ("correct", "num_objects", "elevenths"),
    [
        ("", 1, 0),
        ("0", 1, 0),
        ("1", 1, 11),
        ("01", 1, 5.5),
        ("1", 2, 6),  # recalls of 0 to 0.5
        ("101", 2, 6 + 5 * 2 / 3),
        ("0011", 2, 5.5),  # precision 1/3 at recall 0.5 is below 1/2 at recall 1
        ("111", 10, 4),  # a recall of exactly 0.3 reaches the fourth point
        ("1111111", 10, 8),
    ],
)
def test_eleven_points(correct: str, num_objects: int, elevenths: float) -> None:
    marks = np.array([mark == "1" for mark in correct], bool)
    assert eleven_points(marks, num_objects) == pytest.approx(elevenths / 11)


def parts(rows: list[tuple[int, int, tuple[int, ...], float]], image: int) -> tuple[NDArray[np.float64], ...]:
    """Labels, boxes and last columns of an image's rows."""
    own = [row for row in rows if row[0] == image]
    labels, boxes, last = ([row[column] for row in own] for column in (1, 2, 3))
    return np.array(labels, np.int64), np.array(boxes, np.float64).reshape(-1, 4), np.array(last)


@given(OBJECTS, DETECTIONS)
@example([(0, 0, (0, 0, 4, 4), 0.0)], [(0, 0, (0, 0, 4, 2), 1.0)])  # by exactly half
@example([(0, 0, (0, 0, 4, 4), 1.0), (1, 0, (0, 0, 4, 4), 0.0)], [(0, 0, (0, 0, 4, 4), 0.9)])  # the difficult one
@settings(max_examples=30, deadline=None)
def test_equals_vocs_rules_in_pixels(objects: list, detections: list) -> None:  # type: ignore[type-arg]
    """First and last pixels counted from 1, whose boxes are one wider than their difference."""
    wanted, found = list[Objects](), list[Detections]()
    for image in range(NUM_IMAGES):
        labels, boxes, difficult = parts(objects, image)
        wanted.append(Objects(labels=labels.astype(np.int64), boxes=boxes, difficult=difficult.astype(bool)))
        labels, boxes, scores = parts(detections, image)
        found.append(Detections(labels=labels.astype(np.int64), boxes=boxes, scores=scores.astype(np.float64)))
    precision = average_precision(wanted, found, NUM_CLASSES)
    for label in range(NUM_CLASSES):
        expected = [100 * by_pixels(wanted, found, label, threshold) for threshold in THRESHOLDS]
        assert precision[label].tolist() == pytest.approx(expected, nan_ok=True)


def by_pixels(wanted: list[Objects], found: list[Detections], label: int, threshold: float) -> float:
    """VOC's development kit, detection by detection."""
    pixels = np.array([1, 1, 0, 0])
    ranked = [
        (-score, image, box + pixels)
        for image, each in enumerate(found)
        for score, box, kind in zip(each.scores, each.boxes, each.labels, strict=True)
        if kind == label
    ]
    taken, marks = set[tuple[int, int]](), list[bool]()
    for _, image, box in sorted(ranked, key=lambda each: each[0]):
        overlaps = {
            index: overlap_of_pixels(box, wanted[image].boxes[index] + pixels)
            for index in np.flatnonzero(wanted[image].labels == label).tolist()
        }
        best = max(overlaps, key=lambda index: overlaps[index], default=-1)
        if best >= 0 and overlaps[best] > threshold and wanted[image].difficult[best]:
            continue
        marks.append(best >= 0 and overlaps[best] > threshold and (image, best) not in taken)
        taken |= {(image, best)} if marks[-1] else set()
    total = sum(int(((each.labels == label) & ~each.difficult).sum()) for each in wanted)
    if not total:
        return math.nan
    correct = np.cumsum(marks) if marks else np.zeros(0)
    precision = correct / np.arange(1, len(marks) + 1)
    points = [
        max([p for p, c in zip(precision, correct, strict=True) if 10 * c >= i * total], default=0) for i in range(11)
    ]
    return sum(points) / 11


def overlap_of_pixels(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """By the boxes' first and last pixels."""
    left, top = np.maximum(first[:2], second[:2])
    right, bottom = np.minimum(first[2:], second[2:])
    common = max(right - left + 1, 0) * max(bottom - top + 1, 0)
    areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (first, second)]
    return float(common / (sum(areas) - common))
