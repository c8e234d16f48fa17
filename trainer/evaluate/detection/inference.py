"""Detects the objects on test images, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.data.pixels import PixelScale
from trainer.evaluate.detection.average_precision import Detections
from trainer.evaluate.detection.batches import collate, computed_ahead, resized
from trainer.evaluate.detection.config import DetectConfig
from trainer.evaluate.detection.network import Detected, Size
from trainer.evaluate.detection.voc import VocImage, load_pixels
from trainer.evaluate.progress import Progress, no_progress
from weightserver.torch import Ranks

_IMAGES_AHEAD = 8


@torch.no_grad()
def detect_objects(
    detector: nn.Module,
    images: Sequence[VocImage],
    pixels: PixelScale,
    config: DetectConfig,
    ranks: Ranks,
    *,
    bfloat16: bool = False,
    progress: Progress = no_progress,
) -> Detections:
    """Detects objects on this rank's share of the images, one at a time; returns those of all ranks, on every rank.

    Raises:
        ValueError: an image cannot be decoded.
    """
    detector.eval()
    mine = range(len(images))[ranks.share(len(images))]
    sizes = [resized(images[number], config.test_side, config.max_side) for number in mine]

    def load(place: int) -> Tensor:
        return torch.from_numpy(load_pixels(images[mine[place]], sizes[place]))

    tables = [torch.zeros(0, 7, dtype=torch.float64)]
    with (
        closing(computed_ahead(load, range(len(mine)), _IMAGES_AHEAD)) as loaded,
        progress("detecting", len(mine)) as advance,
    ):
        for number, size, decoded in zip(mine, sizes, loaded, strict=True):
            batch = collate([decoded], size, pixels, ranks.device)
            with torch.autocast(ranks.device.type, torch.bfloat16, enabled=bfloat16):
                [found] = cast(list[Detected], detector(batch, [size]))
            tables.append(_table(number, found, images[number], size))
            advance()
    table = gather_rows(torch.cat(tables), ranks).numpy()
    images_and_labels = table[:, :2].astype("int64")
    return Detections(
        images=images_and_labels[:, 0], labels=images_and_labels[:, 1], scores=table[:, 2], boxes=table[:, 3:]
    )


def gather_rows(rows: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all ranks in the order of ranks: float64 [n, c], without NaN, to float64 [sum of n, c]."""
    if ranks.world_size == 1:
        return rows
    [most] = ranks.max_over_ranks([float(len(rows))])
    padded = torch.full((int(most), rows.shape[1]), math.nan, dtype=torch.float64)
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(ranks.world_size)]
    dist.all_gather(parts, padded)
    table = torch.cat(parts)
    return table[~table[:, 0].isnan()]


def _table(number: int, found: Detected, image: VocImage, size: Size) -> Tensor:
    """Image, label, score and the box in the image's own pixels: float64 [n, 7]."""
    scale = found.boxes.new_tensor([image.width / size[1], image.height / size[0]] * 2)
    columns = [found.labels[:, None], found.scores[:, None], found.boxes * scale]
    table = torch.cat([column.double() for column in columns], dim=1).cpu()
    return torch.cat([torch.full((len(table), 1), float(number), dtype=torch.float64), table], dim=1)
