"""Draws augmented images: rows of views by the strong and by the weak augmentation, or by a run's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from trainer.data.augment import Augmentation
from trainer.data.augmentation_config import AUGMENTATIONS, AugmentationConfig
from trainer.data.datasets import TrainImages
from trainer.data.prefetch import Visits, views_ahead
from trainer.schedule import visit_uniforms

_GAP, _HEADING, _FONT_SIZE = 8, 32, 18
_SHOWN_SIDE = 112
"""Views are enlarged by a whole factor to about this side, so that captions fit and pixels can be seen."""


@dataclass(frozen=True)
class ViewsOfRun:
    """Settings by which views are made."""

    image_size: int = 224
    background: str = "white"
    augmentations: Mapping[str, AugmentationConfig] = field(default_factory=dict)
    """By caption; empty for the paper's, strong and weak."""


def views_of_run(run: Path) -> ViewsOfRun:
    """The views of a run, as its config.json describes them.

    Raises:
        ValueError: no such run, or a damaged config.json.
    """
    path = run / "config.json"
    try:
        settings = json.loads(path.read_text())
        known = {one.name for one in fields(AugmentationConfig)}
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings["augmentation"].items()
            if name in known
        }
        return ViewsOfRun(
            image_size=settings.get("view_size") or settings["encoder"]["image_size"],
            background=settings.get("background", "none"),
            augmentations={f"as in {run}": AugmentationConfig(**options)},
        )
    except OSError as error:
        raise ValueError(f"{run} holds no run ({error.strerror}): give the --output of one") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a run's config.json ({error}): give the --output of a run") from None


def at_size(image_size: int) -> dict[str, AugmentationConfig]:
    """The paper's augmentations by caption, their blur in proportion to the size of the views."""
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
) -> None:
    """Writes a PNG: for each augmentation a heading and one row per image, its centre first, then views as in training.

    The images are evenly spaced by id, so that they come from different classes of a folder. All augmentations use the
    same uniform numbers.

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
    centres = images[ids]  # uint8 (n, C, H, W)
    kinds = [Augmentation(config, image_size) for config in augmentations.values()]
    views = _views(images, ids, kinds, num_views=num_views, seed=seed)
    factor = max(1, round(_SHOWN_SIDE / image_size))
    cell = max(image_size, centres.shape[-1]) * factor + _GAP
    block = _HEADING + num_images * cell
    captions = [f"{name}: the centre, and {num_views} views of {image_size} px" for name in augmentations]
    font = ImageFont.load_default(_FONT_SIZE)
    width = max(_GAP + (num_views + 1) * cell, *(round(font.getlength(text)) + 2 * _GAP for text in captions))
    picture = Image.new("RGB", (width, len(augmentations) * block + _GAP), "white")
    draw = ImageDraw.Draw(picture)
    for number, caption in enumerate(captions):
        top = number * block
        draw.text((_GAP, top + _GAP), caption, fill="black", font=font)
        for row in range(num_images):
            shown = [centres[row], *(view[row] for view in views[number * num_views :][:num_views])]
            for column, one in enumerate(shown):
                left, above = _GAP + column * cell, top + _HEADING + row * cell
                picture.paste(Image.fromarray(_as_rgb(one, factor)), (left, above))
    picture.save(path)


def _views(images: TrainImages, ids: Tensor, kinds: list[Augmentation], *, num_views: int, seed: int) -> list[Tensor]:
    """`num_views` views of each image by each kind in turn: uint8 [n, C, S, S] each."""
    num_images = len(ids)
    uniforms = visit_uniforms(seed, np.arange(num_images * num_views), Augmentation.num_uniforms)
    uniforms = uniforms.reshape(num_images, num_views, -1).swapaxes(0, 1)  # (V, n, num_uniforms)
    augmentations = [augment for augment in kinds for _ in range(num_views)]
    visits = Visits(ids.numpy(), np.concatenate([uniforms] * len(kinds)))
    return [
        ((view + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        for view in views_ahead(images, [visits], augmentations, "cpu")
    ]


def _as_rgb(image: Tensor, factor: int) -> NDArray[np.uint8]:
    """uint8 [C, H, W], C 1 or 3, to [H·factor, W·factor, 3]."""
    enlarged = image.expand(3, -1, -1).repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    pixels: NDArray[np.uint8] = enlarged.permute(1, 2, 0).contiguous().numpy()
    return pixels
