"""Images that are decoded for each use, so that a data set may be larger than the memory."""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.cores import decode_threads
from trainer.data.augment import Augmentation
from trainer.data.config import SourceOptions
from trainer.data.decode import BrokenImageError, Crop, ImageFacts, centre, decode, facts, why
from trainer.data.listing import Listing
from trainer.data.packed import PackedImages
from weightserver.common.logs import Remark
from weightserver.common.threads import in_other_thread
from weightserver.core.arrays import Float32Array, Int64Array

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")
NUM_CHANNELS = 3
_named: set[str] = set()
"""Lines about broken images that this process has shown; `SourceOptions.limit_of_broken` and surveys bound their
number."""


class Chosen:
    """Some of other encoded images, under the ids 0..n-1."""

    def __init__(self, images: EncodedImages, ids: Int64Array) -> None:
        self._images, self._ids = images, ids

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, image: int) -> bytes:
        return self._images.read(int(self._ids[image]))

    def path(self, image: int) -> str:
        return self._images.path(int(self._ids[image]))

    def positions(self, images: Int64Array) -> Int64Array:
        return self._images.positions(self._ids[images])

    def read_ahead(self, images: Int64Array) -> float:
        return self._images.read_ahead(self._ids[images])

    def between(self, start: int, stop: int) -> Int64Array:
        positions = self._images.positions(self._ids)
        return np.flatnonzero((start <= positions) & (positions < stop))

    def replaced(self, images: Int64Array) -> Int64Array:
        return np.sort(images[np.isin(self._ids[images], self._images.replaced(self._ids[images]))])


EncodedImages = Listing | PackedImages | Chosen
"""N encoded images. Thread-safe."""


def named(lines: Iterable[str]) -> None:
    """Notes lines about broken images that were shown, so that they are not logged again."""
    _named.update(lines)


def broken_line(path: str, error: Exception) -> Remark:
    """A line about an image that cannot be read, with the values `path` and `why`."""
    reason = why(error)
    return Remark(f"{path} ({reason})", path=path, why=reason)


class BrokenImages:
    """The broken ones of a number of images, each read once only; an error when there are too many. Thread-safe.

    Kept in memory: a number for each broken image, of which there are no more than may be broken, and its line in
    --broken-list, if that is given.
    """

    def __init__(self, options: SourceOptions, num_images: int, known: Iterable[int] = ()) -> None:
        self._options, self._num_images = options, num_images
        self._limit = options.limit_of_broken(num_images)
        self._next = {image: (image + 1) % num_images for image in known}  # for each broken image, one after it
        self._lock = threading.Lock()
        self._listed, self._listed_bytes = set[bytes](), 0

    def list(self, lines: Iterable[Remark]) -> None:
        """Adds lines with the values `path` and `why` to --broken-list, if it is given, unless they are in it."""
        if (path := self._options.broken_list) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = dict.fromkeys(f"{line.values['path']}\t{line.values['why']}\n" for line in lines)
            with path.open("ab+") as file:
                file.seek(self._listed_bytes)  # a long list is read once
                self._listed.update(file)
                self._listed_bytes = file.tell()
                found = (text.encode(errors="surrogateescape") for text in texts)
                file.writelines(line for line in found if line not in self._listed)

    def first_from(self, image: int) -> int:
        """The first image from one on (after the last, the first) that is not known to be broken.

        Raises:
            ValueError: all are.
        """
        with self._lock:
            if len(self._next) == self._num_images:
                raise ValueError(f"all {self._num_images:,} images are broken: check their disk")
            passed = []
            while image in self._next:
                passed.append(image)
                image = self._next[image]
            self._next |= dict.fromkeys(passed, image)  # so that a long stretch is searched once
        return image

    def note(self, image: int, line: Remark) -> int:
        """Notes a broken image by its line of `broken_line`; returns the number of those known, 0 if it was one. Raises
        ValueError if there are too many."""
        with self._lock:
            if image in self._next:
                return 0
            self._next[image] = (image + 1) % self._num_images
            number = len(self._next)
            self.list([line])
        if number > self._limit:
            raise ValueError(
                f"more than {self._limit} of {self._num_images} images are broken, the last of them {line}: "
                "repair or remove them, or give a higher --max-broken"
            )
        return number


class DecodedImages:
    """Encoded images, decoded by threads for each batch: centre squares for evaluation, crops for training.

    Only the batch is kept in memory. An image that is broken or cannot be read is read and logged once, and replaced by
    the next intact one by id (after the last, the first), with the same limit on their number as in packing; if
    `strict`, it is an error.

    Args:
        options: how pixels become colours, and how many images may be broken.
        threads: default: this rank's share of the cores.
        digests: what identifies the images.

    Raises:
        ValueError: side below 1.
    """

    def __init__(
        self,
        images: EncodedImages,
        side: int,
        options: SourceOptions | None = None,
        *,
        threads: int | None = None,
        digests: tuple[str, ...] = (),
    ) -> None:
        if side < 1:
            raise ValueError(f"the side of images must be at least 1, got {side}")
        self._images, self._side, self._num_images = images, side, len(images)
        self.options, self.digests = options or SourceOptions(), digests
        self._rendering = self.options.rendering()
        self.broken = BrokenImages(self.options, len(images))
        self._device, self._strict = torch.device("cpu"), False
        self._pool = ThreadPoolExecutor(threads or decode_threads(), thread_name_prefix="decode")

    def __len__(self) -> int:
        return self._num_images

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), NUM_CHANNELS, self._side, self._side))

    def __getitem__(self, ids: Tensor | slice) -> Tensor:
        """Centre squares uint8 [n, 3, side, side] of `ids`, int64 [n] in 0..N-1, any order.

        Raises:
            ValueError: too many of the images cannot be read.
        """
        if isinstance(ids, slice):
            ids = torch.arange(*ids.indices(len(self)))
        (squares,) = self._squares(ids.cpu().numpy(), [self._side], lambda _: [Crop(self._side, centre)])
        return squares

    def crops(self, images: Int64Array, augmentations: Sequence[Augmentation], uniforms: Float32Array) -> list[Tensor]:
        """The crops of images (int64 [n]) by each augmentation: uint8 [n, 3, image_size, image_size] each.

        `uniforms` are float32 [augmentations, n, num_uniforms]. Each image is decoded once.

        Raises:
            ValueError: too many of the images cannot be read.
        """
        chosen = [augment.crops(own) for augment, own in zip(augmentations, uniforms, strict=True)]

        def wanted(place: int) -> list[Crop]:
            return [
                Crop(augment.image_size, boxes[place]) for augment, boxes in zip(augmentations, chosen, strict=True)
            ]

        return self._squares(images, [augment.image_size for augment in augmentations], wanted)

    def _squares(self, images: Int64Array, sides: list[int], wanted: Callable[[int], list[Crop]]) -> list[Tensor]:
        """The crops `wanted(place)` of images[place], for every place: uint8 [n, 3, side, side] for each of `sides`."""
        if len(images) and not 0 <= images.min() <= images.max() < len(self):
            raise IndexError(f"ids of images must lie in 0..{len(self) - 1}")
        # copies to a GPU from pinned memory do not block this thread
        pinned = self._device.type == "cuda"
        batches = [
            torch.empty((len(images), NUM_CHANNELS, side, side), dtype=torch.uint8, pin_memory=pinned) for side in sides
        ]
        pixels = [batch.numpy() for batch in batches]
        order = np.argsort(self._images.positions(images), kind="stable")

        def fill(place: int) -> None:
            for batch, square in zip(pixels, self._decode(int(images[place]), wanted(place)), strict=True):
                batch[place] = square

        self._map(fill, order.tolist())
        return [batch.to(self._device, non_blocking=True) for batch in batches]

    def read_ahead(self, batches: Iterable[Int64Array], ahead: int) -> Generator[None, None, None]:
        """Yields once for each of the coming batches of images, int64 [n] each, when the reading of up to `ahead`
        batches after it has begun: fewer if that is as much as may be read ahead, and at first."""
        begun, yielded = deque[float](), 0
        for batch in batches:
            begun.append(self._images.read_ahead(batch))
            while len(begun) > min(ahead, 1 + 3 * yielded) or sum(begun) > 1:
                begun.popleft()
                yielded += 1
                yield
        for _ in begun:
            yield

    def to(self, device: torch.device) -> DecodedImages:
        return self._with(_device=torch.device(device))

    def first(self, num_images: int) -> DecodedImages:
        """The first of these images."""
        return self._with(_num_images=num_images, broken=BrokenImages(self.options, num_images))

    def chosen(self, images: Int64Array) -> DecodedImages:
        """These images alone, int64 [n], under the ids 0..n-1."""
        return self._with(_images=Chosen(self._images, images)).first(len(images))

    def strict(self) -> DecodedImages:
        """Makes a broken image an error when it is read. Raises ValueError if packing replaced one."""
        replaced = self._images.replaced(np.arange(len(self)))
        if len(replaced):
            raise ValueError(
                f"{len(replaced)} images were broken when they were packed, so that others stand for them, first for "
                f"{self._images.path(int(replaced[0]))}: an evaluation counts every test image; repair or remove them "
                "and pack again"
            )
        return self._with(_strict=True)

    def between(self, start: int, stop: int) -> Int64Array:
        """The images at positions start … stop−1, which are read from one place: int64 [n], ascending."""
        return self._images.between(start, stop)

    def paths(self, images: Int64Array) -> list[str]:
        """Paths of images (int64 [n]) when they were listed; in a tar, followed by a colon and the member's name."""
        return [self._images.path(image) for image in images.tolist()]

    def intact(self, images: Int64Array) -> tuple[Int64Array, Tensor, list[Remark]]:
        """The ids, among int64 [n], of images that can be read, their centre squares uint8 [m, 3, side, side], and a
        line for each of the others."""
        replaced = frozenset(self._images.replaced(images).tolist())
        squares = self._each(
            images, lambda content: decode(content, [Crop(self._side, centre)], self._rendering)[0], replaced
        )
        kept = [place for place, one in enumerate(squares) if not isinstance(one, Remark)]
        pixels = np.array([squares[place] for place in kept], np.uint8).reshape(-1, *self.shape[1:])
        return images[kept], torch.from_numpy(pixels), [one for one in squares if isinstance(one, Remark)]

    def facts(self, images: Int64Array) -> tuple[list[ImageFacts], list[Remark]]:
        """What those of images (int64 [n]) are that can be read, and a line for each of the others."""
        found = self._each(images, lambda content: facts(content, self._rendering))
        return [one for one in found if not isinstance(one, Remark)], [one for one in found if isinstance(one, Remark)]

    def _each(
        self, images: Int64Array, of: Callable[[bytes], _Found], replaced: frozenset[int] = frozenset()
    ) -> list[_Found | Remark]:
        """A function of the bytes of each of images (int64 [n]), or a line that says why it cannot be read."""

        def one(image: int) -> _Found | Remark:
            try:
                if image in replaced:
                    raise BrokenImageError("broken when it was packed")
                return of(self._images.read(image))
            except (BrokenImageError, OSError) as error:
                return broken_line(self._images.path(image), error)

        return self._map(one, images.tolist())

    def _map(self, call: Callable[[int], _Found], places: list[int]) -> list[_Found]:
        """A call for each place, by the threads; those that an interrupt leaves behind begin no further one."""
        is_left = False

        def unless_left(place: int) -> _Found:
            if is_left:
                raise KeyboardInterrupt
            return call(place)

        try:
            return in_other_thread(lambda: list(self._pool.map(unless_left, places)))
        finally:
            is_left = True

    def _with(self, **changes: Any) -> DecodedImages:
        """These images with other attributes."""
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    def _decode(self, image: int, crops: list[Crop]) -> list[NDArray[np.uint8]]:
        if self._strict:
            try:
                return decode(self._images.read(image), crops, self._rendering)
            except (BrokenImageError, OSError) as error:
                raise ValueError(
                    f"broken image: {self._images.path(image)} ({why(error)}): an evaluation counts every test image; "
                    "repair it, or remove it from the data set"
                ) from None
        while True:
            image = self.broken.first_from(image)
            try:
                return decode(self._images.read(image), crops, self._rendering)
            except (BrokenImageError, OSError) as error:
                line = broken_line(self._images.path(image), error)
                if (number := self.broken.note(image, line)) and line not in _named:
                    _named.add(line)
                    choice = ": the next intact one is shown in its place" if number == 1 else ""
                    fields = line.values | {"choice": choice, "image": image}
                    _log.warning("broken image: %(path)s (%(why)s)%(choice)s", fields)
