"""Images that are decoded when they are asked for, so that a data set may be larger than any memory."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.decode import BrokenImageError, decode
from weightserver.sharding import Int64Array

_log = logging.getLogger(__name__)
NUM_CHANNELS = 3
_MAX_TRIED = 1_000
_MAX_THREADS = 16


class EncodedImages(Protocol):
    """N images as files' bytes: a `Listing` of files, or `PackedImages`. Thread-safe."""

    def __len__(self) -> int: ...

    def read(self, image: int, /) -> bytes:
        """The encoded bytes of image 0..N-1. Raises OSError where they cannot be read."""

    def name(self, image: int, /) -> str:
        """What a message calls an image."""

    def positions(self, images: Int64Array, /) -> Int64Array:
        """Numbers in whose order images (int64 [n]) are best read: int64 [n]."""


class DecodedImages:
    """The centre squares of encoded images, uint8 [n, 3, side, side], decoded by threads for each batch.

    Nothing is kept but the batch. An image that is broken, or cannot be read, is logged and shown as the next intact
    one by id, after the last the first: what packing does with it too.

    Raises:
        ValueError: side below 1.
    """

    def __init__(
        self, images: EncodedImages, side: int, *, threads: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if side < 1:
            raise ValueError(f"the side of images must be at least 1, got {side}")
        self._images, self._side, self._device = images, side, torch.device(device)
        self._threads = threads or min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="decode")

    def __len__(self) -> int:
        return len(self._images)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), NUM_CHANNELS, self._side, self._side))

    def __getitem__(self, ids: Tensor | slice) -> Tensor:
        """Images uint8 [n, 3, side, side] of `ids`, int64 [n] in 0..N-1, any order; ValueError where all are broken."""
        if isinstance(ids, slice):
            ids = torch.arange(*ids.indices(len(self)))
        images = ids.cpu().numpy()
        if len(images) and not 0 <= images.min() <= images.max() < len(self):
            raise IndexError(f"images are asked for by ids in 0..{len(self) - 1}")
        # What is copied to a GPU goes from pinned memory, while this thread goes on.
        batch = torch.empty((len(images), *self.shape[1:]), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        pixels = batch.numpy()
        order = np.argsort(self._images.positions(images), kind="stable")

        def fill(place: int) -> None:
            pixels[place] = self._decode(int(images[place]))

        for _ in self._pool.map(fill, order.tolist()):
            pass
        return batch.to(self._device, non_blocking=True)

    def to(self, device: torch.device) -> DecodedImages:
        return DecodedImages(self._images, self._side, threads=self._threads, device=device)

    def _decode(self, image: int) -> NDArray[np.uint8]:
        num_tried = min(len(self), _MAX_TRIED)
        for distance in range(num_tried):
            shown = (image + distance) % len(self)
            try:
                return decode(self._images.read(shown), self._side)
            except (BrokenImageError, OSError) as error:
                _log.warning(
                    "broken image", extra={"image": shown, "path": self._images.name(shown), "why": str(error)}
                )
        name = self._images.name(image)
        raise ValueError(f"{name} and all {num_tried} images from it on are broken: is their disk there?")
