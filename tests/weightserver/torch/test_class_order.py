"""Images and rows of classes that many images share, compared with loops over images."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightserver.torch.class_order import ClassOrder, read_labels
from weightserver.torch.windows import RowOrder, VisitSchedule


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(0, 2**64 - 1))
def test_images_of_a_class_are_neighbours_in_the_order_of_rows(chosen: list[int], order_seed: int) -> None:
    labels = np.unique(chosen, return_inverse=True)[1]
    order = ClassOrder(labels, order_seed)
    num_classes = len(set(chosen))
    row_of_class = RowOrder(num_classes, order_seed).rows(np.arange(num_classes)).tolist()
    expected = sorted(range(len(labels)), key=lambda image: (row_of_class[labels[image]], image))
    positions = np.arange(len(labels))
    assert order.images(positions).tolist() == expected
    assert order.rows(positions).tolist() == [row_of_class[labels[image]] for image in expected]
    assert np.array_equal(order.class_of_row(order.rows(positions)), np.array(labels)[order.images(positions)])
    assert (order.num_images, order.num_classes) == (len(labels), num_classes)


def test_a_window_visits_few_classes() -> None:
    """100 classes of 50 images: a window of 500 positions touches at most 11 neighbouring rows, all images of most."""
    order = ClassOrder(np.random.default_rng(0).permutation(np.arange(5_000) % 100), 3)
    schedule = VisitSchedule(num_rows=5_000, window_size=500, window_stride=100, seed=1)
    for window in range(60):
        rows = np.unique(order.rows(schedule.visits(window * 500, (window + 1) * 500)))
        assert len(rows) <= 11
        assert np.count_nonzero(np.diff(rows) != 1) <= 1  # at the end of the table the window continues at its start


@pytest.mark.parametrize("made_by", [list, tuple, torch.tensor])
def test_a_data_sets_targets_are_a_class_map(made_by: Callable[[list[int]], Any]) -> None:
    """Lists and tensors, as torchvision's data sets have them."""
    targets = [0, 2, 1, 0, 2]
    order, same = ClassOrder(made_by(targets), 3), ClassOrder(np.array(targets), 3)
    assert order.digest == same.digest
    assert np.array_equal(order.images(np.arange(5)), same.images(np.arange(5)))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, ">i8"])
def test_a_stored_map_is_the_same_for_every_integer_type(tmp_path: Path, dtype: str) -> None:
    labels = np.random.default_rng(0).permutation(np.arange(200) % 50)
    np.save(tmp_path / "labels.npy", labels.astype(dtype))
    (tmp_path / "labels.csv").write_text("\n".join(map(str, labels)) + "\n\n")
    expected = ClassOrder(labels, 1)
    for name in ("labels.npy", "labels.csv"):
        order = ClassOrder(read_labels(tmp_path / name), 1, num_images=200)
        assert order.digest == expected.digest
        assert np.array_equal(order.images(np.arange(200)), expected.images(np.arange(200)))
    other = labels.copy()
    other[[0, 1]] = other[[1, 0]]
    assert ClassOrder(other, 1).digest != expected.digest


def test_memory_is_a_few_integers_an_image() -> None:
    labels = (np.arange(1 << 21) % 1_000).astype(np.int32)
    tracemalloc.start()
    order = ClassOrder(labels, 0)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / len(labels) < 30
    assert held / len(labels) < 4.5
    assert order.num_classes == 1_000


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 2, 2, 5]), "label 5 but only 4 images: renumber the classes by numpy.unique"),
        (np.array([0, 3, 3, 1]), r"1 of the classes 0\.\.3 have no image, class 2 first: renumber the classes"),
        (np.array([0, 1, -7]), r"label -7 \(image 2\): renumber"),
        (np.array([0.0, 1.0]), r"values of type float64 and shape \[2\]: give one integer for each image"),
        (np.array([True, False]), "values of type bool"),
        (np.zeros((2, 2), int), r"shape \[2, 2\]: give one integer"),
        (np.array([0, 1, 2**63], np.uint64), "label 9223372036854775808 but only 3 images"),
        (np.zeros(0, int), "has no labels: give one label for each image"),
    ],
)
def test_maps_that_are_no_classes_are_refused(labels: npt.NDArray[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassOrder(labels, 0)


def test_a_map_of_other_images_is_refused() -> None:
    with pytest.raises(ValueError, match="3 labels for 4 images: give one label for each image"):
        ClassOrder(np.array([0, 1, 1]), 0, num_images=4)


def archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, labels=np.zeros(3, np.int64))


FILES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "empty": ("labels.txt", lambda path: path.write_text(""), "input contained no data"),
    "a letter": ("labels.txt", lambda path: path.write_text("1\nx\n"), r"'x' .* row 1"),
    "a fraction": ("labels.txt", lambda path: path.write_text("1\n2.5\n"), "2.5"),
    "two columns": ("labels.txt", lambda path: path.write_text("1,2\n3,4\n"), r"shape \[2, 2\]: give one integer for"),
    "missing": ("labels.txt", lambda path: None, "not found"),
    "objects, which are never unpickled": (
        "labels.npy",
        lambda path: np.save(path, np.array([{}, 1], object), allow_pickle=True),
        r"labels.npy \(.*give a .npy file of integers",
    ),
    "an archive, whatever its name": (
        "labels.npy",
        archive,
        r"labels.npy \(.*magic string.*give a .npy file of integers",
    ),
}


@pytest.mark.parametrize(("name", "make", "message"), FILES.values(), ids=FILES.keys())
def test_files_without_labels_are_refused(
    tmp_path: Path, name: str, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(ValueError, match=message) as raised:
        read_labels(tmp_path / name)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_seed_of_numpy_is_a_seed() -> None:
    seed: int = np.int64(3)  # type: ignore[assignment]
    assert ClassOrder([0, 1, 1], seed).images(np.arange(3)).tolist() == ClassOrder([0, 1, 1], 3)._images.tolist()
