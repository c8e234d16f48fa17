"""Features of a data set in files, computed by all ranks, so that they need not fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data import TrainImages
from trainer.evaluate.features import Advance, Frozen
from weightserver.common.atomic_files import atomic_write
from weightserver.torch import Ranks

BLOCK_ROWS = 4_096
"""Features in a file: 16 MiB for features of 2,048 values."""


class StoredFeatures:
    """Features of length 1, float16 [N, d], in mapped .npy files of BLOCK_ROWS rows each: rows are read when needed."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        self._directory, self._num_rows = directory, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, rows: slice) -> Tensor:
        return self.take(torch.arange(*rows.indices(len(self))))

    def take(self, rows: Tensor) -> Tensor:
        """The features float16 [n, d] of `rows`, int64 [n]."""
        ids, blocks = rows.numpy(), rows.numpy() // BLOCK_ROWS
        found = None
        for block in np.unique(blocks).tolist():
            places = np.flatnonzero(blocks == block)
            path = block_file(self._directory, block)
            try:
                values = np.load(path, mmap_mode="r")[ids[places] - block * BLOCK_ROWS]
            except (OSError, ValueError, IndexError) as error:
                raise ValueError(f"cannot read features {path} ({error}): remove it, and repeat the command") from None
            found = np.empty((len(ids), values.shape[1]), np.float16) if found is None else found
            found[places] = values
        return torch.empty(0) if found is None else torch.from_numpy(found)


def block_file(directory: Path, block: int) -> Path:
    return directory / f"{block:07d}.npy"


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes a .npy file atomically."""

    def write(partial: Path) -> None:
        with partial.open("wb") as file:  # np.save would add a suffix to the name
            np.save(file, array)

    atomic_write(path, write)


def store_features(
    frozen: Frozen, images: TrainImages, side: int | None, directory: Path, ranks: Ranks, advance: Advance
) -> StoredFeatures:
    """Computes the features of all images and stores them in `directory`; files that exist are kept.

    Each rank computes every n-th block; all ranks can read all blocks when it returns.

    Raises:
        ValueError: features that are not finite.
        RuntimeError: the encoder has changed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for block in range(ranks.rank, -(-len(images) // BLOCK_ROWS), ranks.world_size):
        ids = torch.arange(block * BLOCK_ROWS, min(len(images), (block + 1) * BLOCK_ROWS))
        file = block_file(directory, block)
        if not file.exists():
            features = F.normalize(frozen.of_images(images, side, ids)).half()
            frozen.check()
            write_array(file, features.numpy())
        advance(len(ids) * ranks.world_size)
    ranks.barrier()
    return StoredFeatures(directory, len(images))
