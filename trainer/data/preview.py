"""Draws augmented images: rows of views by the strong and by the weak augmentation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from trainer.data.augment import AUGMENTATIONS, Augmentation
from trainer.data.datasets import TrainImages
from trainer.data.prefetch import Visits, views_ahead
from trainer.schedule import visit_uniforms

_GAP = 4
_HEADING = 18


def write_preview(
    images: TrainImages, path: Path, *, image_size: int, num_images: int = 4, num_views: int = 8, seed: int = 0
) -> None:
    """Writes a PNG: for each augmentation a heading and one row per image, its centre first, then views as in training.

    The images are evenly spaced by id, so that they come from different classes of a folder. Both augmentations use the
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
    views = _views(images, ids, image_size=image_size, num_views=num_views, seed=seed)
    side = max(image_size, centres.shape[-1])
    cell = side + _GAP
    block = _HEADING + num_images * cell
    picture = Image.new("RGB", (_GAP + (num_views + 1) * cell, len(AUGMENTATIONS) * block + _GAP), "white")
    draw = ImageDraw.Draw(picture)
    for number, name in enumerate(AUGMENTATIONS):
        top = number * block
        draw.text((_GAP, top + _GAP), f"{name}: the centre, and {num_views} views of {image_size} px", fill="black")
        for row in range(num_images):
            shown = [centres[row], *(view[row] for view in views[number * num_views :][:num_views])]
            for column, one in enumerate(shown):
                left, above = _GAP + column * cell, top + _HEADING + row * cell
                picture.paste(Image.fromarray(_as_rgb(one)), (left, above))
    picture.save(path)


def _views(images: TrainImages, ids: Tensor, *, image_size: int, num_views: int, seed: int) -> list[Tensor]:
    """`num_views` views by each augmentation in turn: uint8 [n, C, S, S] each."""
    num_images = len(ids)
    uniforms = visit_uniforms(seed, np.arange(num_images * num_views), Augmentation.num_uniforms)
    uniforms = uniforms.reshape(num_images, num_views, -1).swapaxes(0, 1)  # (V, n, num_uniforms)
    augmentations = [Augmentation(config, image_size) for config in AUGMENTATIONS.values() for _ in range(num_views)]
    visits = Visits(ids.numpy(), np.concatenate([uniforms] * len(AUGMENTATIONS)))
    return [
        ((view + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        for view in views_ahead(images, [visits], augmentations, "cpu")
    ]


def _as_rgb(image: Tensor) -> NDArray[np.uint8]:
    """uint8 [C, H, W], C 1 or 3, to [H, W, 3]."""
    pixels: NDArray[np.uint8] = image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    return pixels
