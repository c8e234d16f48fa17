"""Average precision: cases worked out by hand, and VOC's rules in pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.evaluate.paper.average_precision import THRESHOLDS, Detections, Objects, average_precision, eleven_points

Rows = list[tuple[float, ...]]


NUM_IMAGES = 12


def objects(rows: Rows, difficult: tuple[int, ...] = ()) -> list[Objects]:
    """Rows of image, label and box."""
    table = np.array(rows, np.float64).reshape(-1, 6)
    marks = np.isin(np.arange(len(table)), difficult)
    parts = [table[:, 0] == image for image in range(NUM_IMAGES)]
    return [
        Objects(labels=table[part, 1].astype(np.int64), boxes=table[part, 2:], difficult=marks[part]) for part in parts
    ]


def detections(rows: Rows) -> list[Detections]:
    """Rows of image, label, box and score."""
    table = np.array(rows, np.float64).reshape(-1, 7)
    parts = [table[table[:, 0] == image] for image in range(NUM_IMAGES)]
    return [Detections(labels=part[:, 1].astype(np.int64), boxes=part[:, 2:6], scores=part[:, 6]) for part in parts]


def at_half(wanted: list[Objects], found: list[Detections], num_classes: int = 1) -> float:
    at = average_precision(wanted, found, num_classes)[:, 0]
    return float(at[~np.isnan(at)].mean()) if (~np.isnan(at)).any() else math.nan


BOX = (10.0, 10.0, 20.0, 20.0)
ELSEWHERE = (50.0, 50.0, 60.0, 60.0)


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


def test_perfect_and_absent_detections() -> None:
    wanted = objects([(0, 0, *BOX), (1, 0, *ELSEWHERE)])
    exact = average_precision(wanted, detections([(0, 0, *BOX, 0.9), (1, 0, *ELSEWHERE, 0.2)]), 1)
    assert (exact == 100).all()
    assert at_half(wanted, detections([])) == 0
    assert at_half(wanted, detections([(1, 0, *BOX, 0.9), (0, 0, *ELSEWHERE, 0.9)])) == 0, "of the other image"
    assert at_half(wanted, detections([(0, 1, *BOX, 0.9)])) == 0, "of another class"
    assert math.isnan(at_half(objects([]), detections([(0, 0, *BOX, 0.9)])))


def test_an_object_is_found_once() -> None:
    wanted = objects([(0, 0, *BOX), (0, 0, *ELSEWHERE)])
    twice = detections([(0, 0, *BOX, 0.9), (0, 0, *BOX, 0.8), (0, 0, *ELSEWHERE, 0.7)])
    assert at_half(wanted, twice) == pytest.approx(100 * (6 + 5 * 2 / 3) / 11)


def test_the_overlap_must_exceed_the_threshold() -> None:
    wanted = objects([(0, 0, 0.0, 0.0, 10.0, 10.0)])
    assert at_half(wanted, detections([(0, 0, 0.0, 0.0, 10.0, 5.0, 1.0)])) == 0, "exactly a half"
    found = average_precision(wanted, detections([(0, 0, 0.0, 0.0, 10.0, 7.6, 1.0)]), 1)
    assert found[0].tolist() == [100.0] * 6 + [0.0] * 4, "0.76 exceeds 0.5 to 0.75"


def test_difficult_objects_count_for_nothing() -> None:
    wanted = objects([(0, 0, *BOX), (0, 0, *ELSEWHERE)], difficult=(1,))
    only = detections([(0, 0, *BOX, 0.5)])
    with_difficult = detections([(0, 0, *ELSEWHERE, 0.9), (0, 0, *ELSEWHERE, 0.8), (0, 0, *BOX, 0.5)])
    assert at_half(wanted, only) == at_half(wanted, with_difficult) == 100
    of_two = objects([(0, 0, *BOX), (0, 0, *ELSEWHERE), (1, 0, *BOX)], difficult=(1,))
    assert at_half(of_two, with_difficult) == pytest.approx(100 * 6 / 11)
    assert math.isnan(at_half(objects([(0, 0, *BOX)], difficult=(0,)), only))


def test_a_detection_belongs_to_the_object_that_it_overlaps_most() -> None:
    """The second detection overlaps both objects by more than half, the found one most: it is false."""
    near = (10.0, 11.0, 20.0, 21.0)
    wanted = objects([(0, 0, *BOX), (0, 0, *near)])
    found = detections([(0, 0, *BOX, 0.9), (0, 0, 10.0, 10.2, 20.0, 20.2, 0.8)])
    assert at_half(wanted, found) == pytest.approx(100 * 6 / 11)


def test_classes_without_objects_have_no_average() -> None:
    wanted = objects([(0, 0, *BOX), (0, 2, *BOX)])
    found = average_precision(wanted, detections([(0, 0, *BOX, 0.9), (0, 1, *BOX, 0.9)]), 4)
    assert found[[0, 2]].mean() == 50
    assert np.isnan(found).all(axis=1).tolist() == [False, True, False, True]


def test_ties_are_in_the_order_of_images() -> None:
    wanted = objects([(0, 0, *BOX)])
    true_first = detections([(0, 0, *BOX, 0.5), (1, 0, *BOX, 0.5)])
    assert at_half(wanted, true_first) == 100


def random_case(seed: int) -> tuple[list[Objects], list[Detections]]:
    """Objects of an image do not overlap by half, so that all rules match alike."""
    random = np.random.default_rng(seed)
    wanted, found = Rows(), Rows()
    for image in range(NUM_IMAGES):
        for column in range(random.integers(4)):
            left, top = 40 * column + random.integers(8), random.integers(20)
            box = np.array([left, top, left + random.integers(8, 30), top + random.integers(8, 30)])
            label = int(random.integers(3))
            wanted.append((image, label, *box))
            for _ in range(random.integers(3)):
                moved = box + random.uniform(-3, 3, 4)
                found.append((image, label if random.random() < 0.9 else 0, *moved, random.random()))
        found.append((image, int(random.integers(3)), 10.1, 9.8, 20.3, 20.2, random.random()))
    difficult = np.flatnonzero(random.random(len(wanted)) < 0.2)
    return objects(wanted, tuple(difficult.tolist())), detections(found)


@pytest.mark.parametrize("seed", range(8))
def test_equals_vocs_rules_in_pixels(seed: int) -> None:
    """First and last pixels counted from 1, whose boxes are one wider than their difference."""
    wanted, found = random_case(seed)
    precision = average_precision(wanted, found, 3)
    for label in range(3):
        for threshold in THRESHOLDS:
            expected = by_pixels(wanted, found, label, threshold)
            assert precision[label, THRESHOLDS.index(threshold)] == pytest.approx(100 * expected, nan_ok=True)


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
