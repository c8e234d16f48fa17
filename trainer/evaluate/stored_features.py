"""Features of a data set in files, computed by all ranks, so that they need not fit into memory."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.data import TrainImages
from trainer.evaluate.evaluation import Advance
from trainer.evaluate.frozen import Frozen, centres
from weightserver.common.atomic_files import atomic_write
from weightserver.torch import Ranks

BLOCK_ROWS = 4_096
"""Features in a file: 16 MiB for features of 2,048 values."""
_BATCH_SIZE = 256
_KEY = "features"


class StoredFeatures:
    """Features of length 1, float16 [N, d], in files of BLOCK_ROWS rows each; parts are read when they are needed."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        self._directory, self._num_rows = directory, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, rows: slice) -> Tensor:
        first, last, _ = rows.indices(len(self))
        parts = []
        for block in range(first // BLOCK_ROWS, -(-last // BLOCK_ROWS)):
            start = block * BLOCK_ROWS
            path = block_file(self._directory, block)
            try:
                with safe_open(path, framework="pt") as file:
                    parts.append(file.get_slice(_KEY)[max(0, first - start) : min(BLOCK_ROWS, last - start)])
            except (OSError, SafetensorError) as error:
                raise ValueError(f"cannot read features {path} ({error}): remove it, and repeat the command") from None
        return torch.cat(parts)

    def take(self, rows: Tensor) -> Tensor:
        """The features float16 [n, d] of `rows`, int64 [n]."""
        order = rows.argsort()
        parts = []
        for block in range(-(-len(self) // BLOCK_ROWS)):
            start = block * BLOCK_ROWS
            inside = rows[order][(rows[order] >= start) & (rows[order] < start + BLOCK_ROWS)]
            if len(inside):
                parts.append(self[start : start + BLOCK_ROWS][inside - start])
        return torch.cat(parts)[order.argsort()]


def block_file(directory: Path, block: int) -> Path:
    return directory / f"{block:07d}.safetensors"


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
            batches = centres(images, side, ids, _BATCH_SIZE)
            features = torch.cat([F.normalize(frozen.of_pixels(batch)).half().cpu() for batch in batches])
            frozen.check()
            atomic_write(file, lambda path, tensors={_KEY: features}: save_file(tensors, path))  # type: ignore[misc]
        advance(len(ids) * ranks.world_size)
    ranks.barrier()
    return StoredFeatures(directory, len(images))
