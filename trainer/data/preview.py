"""Draws augmented images: rows of views by the strong and by the weak augmentation, or by a run's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from trainer.data.augment import Augmentation
from trainer.data.augmentation_config import AUGMENTATIONS, AugmentationConfig
from trainer.data.datasets import TrainImages
from trainer.data.prefetch import Visits, views_ahead
from trainer.schedule import visit_uniforms
from trainer.settings import settings_of

_GAP = 8
_SHOWN_SIDE = 112
"""Views are enlarged by a whole factor to about this side, so that pixels can be seen."""


@dataclass(frozen=True)
class ViewsOfRun:
    """Settings by which views are made."""

    image_size: int = 224
    background: str = "white"
    augmentations: Mapping[str, AugmentationConfig] = field(default_factory=dict)
    """By name; empty for the paper's, strong and weak."""


def views_of_run(run: Path) -> ViewsOfRun:
    """The views of a run, as its config.json describes them.

    Raises:
        ValueError: no such run, or a damaged config.json.
    """
    path = run / "config.json"
    try:
        settings = json.loads(path.read_text())
        return ViewsOfRun(
            image_size=settings.get("view_size") or settings["encoder"]["image_size"],
            background=settings.get("background", "none"),
            augmentations={f"as in {run}": settings_of(AugmentationConfig, settings["augmentation"])},
        )
    except OSError as error:
        raise ValueError(f"{run} holds no run ({error.strerror}): give the --output of one") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a run's config.json ({error}): give the --output of a run") from None


def at_size(image_size: int) -> dict[str, AugmentationConfig]:
    """The paper's augmentations by name, their blur in proportion to the size of the views."""
    return {name: config.at_size(image_size) for name, config in AUGMENTATIONS.items()}


def write_preview(
    images: TrainImages,
    path: Path,
    *,
    image_size: int,
    augmentations: Mapping[str, AugmentationConfig],
    num_images: int = 4,
    num_views: int = 8,
    seed: int = 0,
) -> str:
    """Writes a PNG: for each augmentation one row per image, its centre first, then views as in training.

    The images are evenly spaced by id, so that they come from different classes of a folder. All augmentations use the
    same uniform numbers. Returns a line that says what the rows are.

    Raises:
        ValueError: a number out of range, or a path without the suffix .png.
        OSError: it cannot be written.
    """
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(f"{path} is not a PNG in an existing folder: give --output NAME.png")
    for name, number in (("images", num_images), ("views", num_views), ("image-size", image_size)):
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, got {number}")
    num_images = min(num_images, len(images))
    ids = torch.arange(num_images) * len(images) // num_images
    edge = (images.shape[-1] - image_size) // 2
    centres = images[ids][..., edge : edge + image_size, edge : edge + image_size]  # uint8 (n, C, S, S)
    views = _views(
        images, ids, [Augmentation(config, image_size) for config in augmentations.values()], num_views, seed
    )
    grid = torch.cat([torch.cat([centres[:, None], of_kind], dim=1) for of_kind in views])  # (rows, columns, C, S, S)
    factor = max(1, round(_SHOWN_SIDE / image_size))
    grid = grid.repeat_interleave(factor, dim=-1).repeat_interleave(factor, dim=-2)
    grid = F.pad(grid, (0, _GAP, 0, _GAP), value=255)
    picture = grid.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # (height, width, C)
    Image.fromarray(picture.numpy()).save(path)
    return ", then ".join(f"{num_images} rows {name}" for name in augmentations)


def _views(images: TrainImages, ids: Tensor, kinds: list[Augmentation], num_views: int, seed: int) -> list[Tensor]:
    """`num_views` views of each image, by each kind: uint8 [n, num_views, C, S, S] each."""
    num_images = len(ids)
    uniforms = visit_uniforms(seed, np.arange(num_images * num_views), Augmentation.num_uniforms)
    uniforms = uniforms.reshape(num_images, num_views, -1).swapaxes(0, 1)  # (V, n, num_uniforms)
    augmentations = [augment for augment in kinds for _ in range(num_views)]
    visits = Visits(ids.numpy(), np.concatenate([uniforms] * len(kinds)))
    views = torch.stack(list(views_ahead(images, [visits], augmentations, "cpu")), dim=1)
    return list(torch.split(((views + 1) * 127.5).round().clamp(0, 255).to(torch.uint8), num_views, dim=1))
