"""Images that are decoded for each use, so that a data set may be larger than the memory."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.cores import decode_threads
from trainer.data.augment import Augmentation
from trainer.data.decode import (
    DEFAULT_RENDERING,
    BrokenImageError,
    Crop,
    ImageFacts,
    Rendering,
    centre,
    decode,
    facts,
    header_size,
    max_broken,
    why,
)
from weightserver.common.logs import Remark
from weightserver.core.arrays import Float32Array, Int64Array

_log = logging.getLogger(__name__)
NUM_CHANNELS = 3
_JPEG = b"\xff\xd8\xff"
_MAX_TRIED = 1_000
_named: set[str] = set()
"""Lines about broken images that this process has shown; `max_broken` and surveys bound their number."""


class EncodedImages(Protocol):
    """N encoded images: a `Listing` of files, or `PackedImages`. Thread-safe."""

    def __len__(self) -> int: ...

    def read(self, image: int, /) -> bytes:
        """The encoded bytes of image 0..N-1. Raises OSError if they cannot be read."""

    def name(self, image: int, /) -> str:
        """The name of an image in messages."""

    def path(self, image: int, /) -> str:
        """Path of an image's file when it was listed; in a tar, followed by a colon and the member's name."""

    def positions(self, images: Int64Array, /) -> Int64Array:
        """Positions, int64 [n], in whose order images (int64 [n]) are read fastest."""

    def replaced(self) -> Int64Array:
        """The ids of images that others stand for, because they were broken when they were packed."""


class Chosen:
    """Some of other encoded images, under the ids 0..n-1."""

    def __init__(self, images: EncodedImages, ids: Int64Array) -> None:
        self._images, self._ids = images, ids

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, image: int) -> bytes:
        return self._images.read(int(self._ids[image]))

    def name(self, image: int) -> str:
        return self._images.name(int(self._ids[image]))

    def path(self, image: int) -> str:
        return self._images.path(int(self._ids[image]))

    def positions(self, images: Int64Array) -> Int64Array:
        return self._images.positions(self._ids[images])

    def replaced(self) -> Int64Array:
        return np.flatnonzero(np.isin(self._ids, self._images.replaced()))


def named(lines: Iterable[str]) -> None:
    """Notes lines about broken images that were shown, so that they are not logged again."""
    _named.update(lines)


class ImageHeader(NamedTuple):
    """What an image's header says, and the size of the encoded image."""

    width: int
    height: int
    num_bytes: int


@dataclass
class BrokenImages:
    """Counts the broken images of a data set, names each once, and ends the process when there are too many."""

    most: int | None = None
    """The number that is allowed; None for 100, or one percent if that is more."""
    file: Path | None = None
    """A file to which each is added: its path, a tab and the reason."""
    found: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of_others(self) -> BrokenImages:
        """The same for images under other ids."""
        return BrokenImages(self.most, self.file)

    def limit(self, num_images: int) -> int:
        return max_broken(num_images) if self.most is None else self.most

    def list(self, *lines: str) -> None:
        """Adds lines to the file, if there is one."""
        if self.file is not None:
            with self.file.open("a", encoding="utf-8", errors="surrogateescape") as file:
                file.writelines(f"{line}\n" for line in lines)

    def note(self, image: int, name: str, reason: str, num_images: int) -> None:
        """Notes a broken image. Raises ValueError if there are too many."""
        with self.lock:
            if image in self.found:
                return
            self.found.add(image)
            number = len(self.found)
            self.list(f"{name}\t{reason}")
        choice = ": the next intact one is shown in its place" if number == 1 else ""
        if (line := f"{name} ({reason})") not in _named:
            _named.add(line)
            fields = {"path": name, "why": reason, "choice": choice, "image": image}
            _log.warning("broken image: %(path)s (%(why)s)%(choice)s", fields)
        if number > (limit := self.limit(num_images)):
            raise ValueError(
                f"more than {limit} of {num_images} images are broken, the last of them {name} ({reason}): "
                "repair or remove them, or give a higher --max-broken"
            )


class DecodedImages:
    """Encoded images, decoded by threads for each batch: centre squares for evaluation, crops for training.

    Only the batch is kept in memory. An image that is broken or cannot be read is logged once and replaced by the next
    intact one by id (after the last, the first), with the same limit on their number as in packing; if `strict`, it is
    an error.

    Args:
        num_images: use only the first `num_images` images.
        threads: default: this rank's share of the cores.
        broken: the broken images; default: none so far.

    Raises:
        ValueError: side below 1.
    """

    def __init__(
        self,
        images: EncodedImages,
        side: int,
        *,
        num_images: int | None = None,
        threads: int | None = None,
        device: torch.device | str = "cpu",
        strict: bool = False,
        rendering: Rendering = DEFAULT_RENDERING,
        broken: BrokenImages | None = None,
    ) -> None:
        if side < 1:
            raise ValueError(f"the side of images must be at least 1, got {side}")
        self._images, self._side, self._device = images, side, torch.device(device)
        self._num_images = len(images) if num_images is None else num_images
        self._strict = strict
        self._rendering = rendering
        self._broken = broken or BrokenImages()
        self._threads = threads or decode_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="decode")

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
                Crop(augment.image_size, boxes[place].box) for augment, boxes in zip(augmentations, chosen, strict=True)
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

        for _ in self._pool.map(fill, order.tolist()):
            pass
        return [batch.to(self._device, non_blocking=True) for batch in batches]

    def to(self, device: torch.device) -> DecodedImages:
        return self._like(num_images=len(self), device=device)

    def first(self, num_images: int) -> DecodedImages:
        """The first of these images."""
        return self._like(num_images=num_images, device=self._device)

    def chosen(self, images: Int64Array) -> DecodedImages:
        """Those of these images, int64 [n], under the ids 0..n-1."""
        return self._like(num_images=len(images), device=self._device, images=Chosen(self._images, images))

    def strict(self) -> DecodedImages:
        """The same images, all of which count: a broken one is an error. Raises ValueError if packing replaced one."""
        replaced = self._images.replaced()
        if len(replaced):
            name = self._images.name(int(replaced[0]))
            raise ValueError(
                f"{len(replaced)} images were broken when they were packed, so that others stand for them, first for "
                f"{name}: an evaluation counts every test image; repair or remove them and pack again"
            )
        return self._like(num_images=len(self), device=self._device, strict=True)

    @property
    def max_broken(self) -> int:
        """Number of broken images beyond which a run ends."""
        return self._broken.limit(len(self))

    def names(self) -> Iterator[str]:
        """The names of all images, in the order of their ids."""
        return map(self._images.name, range(len(self)))

    def paths(self, images: Int64Array) -> list[str]:
        """Paths of images (int64 [n]) when they were listed; in a tar, followed by a colon and the member's name."""
        return [self._images.path(image) for image in images.tolist()]

    def intact(self, images: Int64Array) -> tuple[Int64Array, Tensor, list[Remark]]:
        """Those of images (int64 [n]) that can be read, their centre squares uint8 [m, 3, side, side], and a line for
        each of the others."""

        def unread(image: int, reason: str) -> Remark:
            path = self._images.path(image)
            return Remark(f"{path} ({reason})", path=path, why=reason)

        def square(image: int) -> NDArray[np.uint8] | Remark:
            try:
                return decode(self._images.read(image), [Crop(self._side, centre)], self._rendering)[0]
            except (BrokenImageError, OSError) as error:
                return unread(image, why(error))

        found = [
            unread(image, "broken when it was packed") if image in self._replaced else None for image in images.tolist()
        ]
        decoded = self._pool.map(square, images.tolist())
        squares = [line or one for line, one in zip(found, decoded, strict=True)]
        kept = [place for place, one in enumerate(squares) if not isinstance(one, Remark)]
        pixels = np.array([squares[place] for place in kept], np.uint8).reshape(
            -1, NUM_CHANNELS, self._side, self._side
        )
        return images[kept], torch.from_numpy(pixels), [one for one in squares if isinstance(one, Remark)]

    def list_broken(self, images: Int64Array) -> None:
        """Adds those of images (int64 [n]) that cannot be read to the file for broken images, if there is one."""
        broken = (line.fields() for line in self.intact(images)[2])
        self._broken.list(*(f"{line['path']}\t{line['why']}" for line in broken))

    @functools.cached_property
    def _replaced(self) -> frozenset[int]:
        return frozenset(self._images.replaced().tolist())

    def header(self, image: int) -> ImageHeader | str:
        """The header of image 0..N-1, or a line that says why it cannot be read."""
        try:
            content = self._images.read(image)
            return ImageHeader(*header_size(content), len(content))
        except (BrokenImageError, OSError) as error:
            return f"{self._images.name(image)} ({why(error)})"

    def facts(self, image: int) -> ImageFacts | None:
        """What image 0..N-1 is; None if it is a JPEG, or cannot be read."""
        try:
            content = self._images.read(image)
            return None if content.startswith(_JPEG) else facts(content)
        except (BrokenImageError, OSError):
            return None

    def _like(
        self,
        *,
        num_images: int,
        device: torch.device,
        strict: bool | None = None,
        images: EncodedImages | None = None,
    ) -> DecodedImages:
        return DecodedImages(
            images or self._images,
            self._side,
            num_images=num_images,
            threads=self._threads,
            device=device,
            strict=self._strict if strict is None else strict,
            rendering=self._rendering,
            broken=self._broken if images is None else self._broken.of_others(),
        )

    def _decode(self, image: int, crops: list[Crop]) -> list[NDArray[np.uint8]]:
        if self._strict:
            try:
                return decode(self._images.read(image), crops, self._rendering)
            except (BrokenImageError, OSError) as error:
                raise ValueError(
                    f"broken image: {self._images.name(image)} ({why(error)}): an evaluation counts every test image; "
                    "repair it, or remove it from the data set"
                ) from None
        num_tried = min(len(self), _MAX_TRIED)
        for distance in range(num_tried):
            shown = (image + distance) % len(self)
            try:
                return decode(self._images.read(shown), crops, self._rendering)
            except (BrokenImageError, OSError) as error:
                self._broken.note(shown, self._images.name(shown), why(error), len(self))
        name = self._images.name(image)
        raise ValueError(f"{name} and all {num_tried} images from it on are broken: check their disk")
