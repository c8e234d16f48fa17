"""Classes that many images share: which images a class has, and which row of the table is its own."""

from __future__ import annotations

import hashlib
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Int64Array, checked_integer
from weightserver.torch.windows import RangesOrder, RowOrder

_IMAGES_AT_A_TIME = 1 << 20
"""Labels that are read and converted together: a memory-mapped file is never read whole."""
_RENUMBER = "renumber the classes by numpy.unique(labels, return_inverse=True)[1]"

Labels = npt.NDArray[np.integer[Any]]


class ClassOrder:
    """The order of N images by C classes: classes in a keyed random order, the images of a class as neighbours.

    The row of a class is its place in the order of the classes, by default `RowOrder(C, order_seed)`; position p in
    0..N−1 is the p-th image when the images are sorted by the rows of their classes. A window that slides over
    positions therefore visits class after class, with neighbouring rows. If each image is its own class, positions and
    rows are those of the order itself.

    Holds two integers an image at most (4 bytes each below 2³¹ images) and two a class; construction needs about 24
    bytes an image.

    Args:
        labels: class of each image, integers [N] (an array, a list or a CPU tensor), each class 0..C−1 with at least
            one image; may be memory-mapped.
        order: the order of the classes, or its seed.
        num_images: N, if it is known otherwise.

    Raises:
        ValueError: labels that are not integers, not one for each image, negative, or classes without images; an order
            of another number of classes.
    """

    def __init__(
        self, labels: npt.ArrayLike, order: int | RowOrder | RangesOrder, *, num_images: int | None = None
    ) -> None:
        labels = np.asarray(labels)  # of a list or a CPU tensor too; a memory-mapped array stays on disk
        images_of_class = _checked_counts(labels, num_images)
        self.num_images = len(labels)
        self.num_classes = len(images_of_class)
        self._labels = labels
        if not isinstance(order, RowOrder | RangesOrder):
            order = RowOrder(self.num_classes, checked_integer(order, "order"))
        self._order = order
        if self._order.num_rows != self.num_classes:
            raise ValueError(
                f"the class map has {self.num_classes} classes, the table {self._order.num_rows} rows: "
                "give a map of as many classes"
            )
        row_of_class = self._order.rows(np.arange(self.num_classes))
        self._first = np.zeros(self.num_classes + 1, np.int64)  # position of the first image of each row's class
        self._first[1 + row_of_class] = images_of_class
        np.cumsum(self._first, out=self._first)
        small = np.int32 if self.num_images < 2**31 else np.int64
        rows = np.empty(self.num_images, small)
        for part in _parts(self.num_images):
            rows[part] = row_of_class[labels[part]]
        self._images = np.argsort(rows, kind="stable").astype(small)

    @property
    def num_rows(self) -> int:
        """N, the number of positions, by which orders of images name it."""
        return self.num_images

    def images(self, positions: Int64Array) -> Int64Array:
        """The image at each position: int64 [n] to int64 [n]."""
        return self._images[positions].astype(np.int64)

    def rows(self, positions: Int64Array) -> Int64Array:
        """The row of the class of the image at each position: int64 [n] to int64 [n]."""
        rows: Int64Array = np.searchsorted(self._first, positions, side="right") - 1
        return rows

    def fewest_classes(self, window_size: int) -> int:
        """The fewest classes that neighbouring images have, as many as a window; of 100,000 windows at most."""
        starts = np.arange(0, self.num_images - window_size + 1, 1 + self.num_images // 100_000)
        return int((self.rows(starts + window_size - 1) - self.rows(starts)).min()) + 1

    def class_of_row(self, rows: Int64Array) -> Int64Array:
        """The class of each row: int64 [n] to int64 [n]."""
        return self._order.images(rows)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the labels, the same for every integer type: identifies the class map."""
        digest = hashlib.sha256()
        for part in _parts(self.num_images):
            digest.update(np.asarray(self._labels[part]).astype("<i8").tobytes())
        return digest.hexdigest()


def read_labels(path: str | Path) -> Labels:
    """Reads a class map: a .npy file of integers (memory-mapped, never unpickled), or text of one integer a line.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    path = Path(path)
    try:
        if path.suffix == ".npy":
            labels: Labels = np.lib.format.open_memmap(path, mode="r")
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an empty file, a number with a fraction
                labels = np.loadtxt(path, np.int64, comments=None, delimiter=",", ndmin=1)
    except (OSError, ValueError, UserWarning, DeprecationWarning) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"cannot read {path} ({reason}): give a .npy file of integers, or text of one integer a line"
        ) from None
    _check_integers(labels, f"{path} holds")
    return labels


def _check_integers(labels: npt.NDArray[Any], holder: str) -> None:
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise ValueError(
            f"{holder} values of type {labels.dtype} and shape {list(labels.shape)}: "
            "give one integer for each image, of shape [N]"
        )


def _checked_counts(labels: Labels, num_images: int | None) -> Int64Array:
    """The number of images of each class, int64 [C]. Raises ValueError as `ClassOrder` does."""
    _check_integers(labels, "the class map has")
    if num_images is not None and len(labels) != num_images:
        raise ValueError(
            f"the class map has {len(labels)} labels for {num_images} images: give one label for each image"
        )
    if not len(labels):
        raise ValueError("the class map has no labels: give one label for each image")
    counts = np.zeros(0, np.int64)
    for part in _parts(len(labels)):
        some = labels[part]
        lowest, highest = int(some.min()), int(some.max())
        if lowest < 0:
            raise ValueError(f"the class map has label {lowest} (image {part.start + int(some.argmin())}): {_RENUMBER}")
        if highest >= len(labels):  # at least one class has no image; also, counting could exhaust the memory
            raise ValueError(f"the class map has label {highest} but only {len(labels)} images: {_RENUMBER}")
        found = np.bincount(some.astype(np.int64, copy=False), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    if len(empty := np.flatnonzero(counts == 0)):
        raise ValueError(
            f"{len(empty)} of the classes 0..{len(counts) - 1} have no image, class {empty[0]} first: {_RENUMBER}"
        )
    return counts


def _parts(count: int) -> list[slice]:
    return [slice(start, min(count, start + _IMAGES_AT_A_TIME)) for start in range(0, count, _IMAGES_AT_A_TIME)]
