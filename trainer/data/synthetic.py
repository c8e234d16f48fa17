"""Images generated from their ids, in any number and without memory: to measure rows at scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightserver.core.splitmix import splitmix64
from weightserver.torch import to_device

MAX_IMAGES = 10**9
MAX_IMAGE_SIZE = 1024
NUM_CHANNELS = 3
_GRID = 8
"""Side of the coarse pattern of an image."""
_CHUNK_BYTES = 1 << 18
"""Bytes of images computed at once, so that the work stays in the cache."""


@dataclass(frozen=True, kw_only=True)
class SyntheticImages:
    """Coarse random patterns of 8×8 patches with noise, a pure function of (seed, image_size, id).

    They are computed on the CPU from SplitMix64 bits by integer arithmetic only, hence the same on every machine, and
    then moved to `device`. Thread-safe.

    Raises:
        ValueError: settings out of range.
    """

    num_images: int
    """N, up to 10⁹."""
    image_size: int = 32
    """Side of an image, in pixels."""
    seed: int = 0
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if not 1 <= self.num_images <= MAX_IMAGES:
            raise ValueError(f"num_images must lie in 1..{MAX_IMAGES:,}, got {self.num_images}")
        if not 1 <= self.image_size <= MAX_IMAGE_SIZE:
            raise ValueError(f"image_size must lie in 1..{MAX_IMAGE_SIZE}, got {self.image_size}")

    def __len__(self) -> int:
        return self.num_images

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_images, NUM_CHANNELS, self.image_size, self.image_size))

    def __getitem__(self, ids: Tensor | slice) -> Tensor:
        """Images uint8 [n, 3, image_size, image_size] of `ids`, int64 [n] in 0..N-1, any order."""
        if isinstance(ids, slice):
            ids = torch.arange(*ids.indices(self.num_images))
        return to_device(self._generate(ids.cpu().numpy()), torch.device(self.device))

    def to(self, device: torch.device) -> SyntheticImages:
        return replace(self, device=device)

    def _generate(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        side, num_patches, num_pixels = self.image_size, NUM_CHANNELS * _GRID**2, NUM_CHANNELS * self.image_size**2
        words_per_image = -(-(num_patches + num_pixels) // 8)
        words = np.arange(words_per_image, dtype=np.uint64)
        patch = np.arange(side) * _GRID // side  # patch of each row and column of pixels
        images = np.empty((len(ids), NUM_CHANNELS, side, side), dtype=np.uint8)
        chunk = max(1, _CHUNK_BYTES // (8 * words_per_image))
        for start in range(0, len(ids), chunk):
            first_word = ids[start : start + chunk].astype(np.uint64) * np.uint64(words_per_image)
            bits = splitmix64(self.seed, first_word[:, None] + words).astype("<u8", copy=False).view(np.uint8)
            pattern = bits[:, :num_patches].reshape(-1, NUM_CHANNELS, _GRID, _GRID)
            pattern = pattern - (pattern >> 2)  # 0..192, and noise of 0..63 on it
            noise = bits[:, num_patches : num_patches + num_pixels].reshape(-1, NUM_CHANNELS, side, side) >> 2
            np.add(pattern[..., patch][:, :, patch], noise, out=images[start : start + chunk])
        return images
