"""A picture of what augmentation makes of images: rows of views, by the strong augmentation and the weak one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from trainer.data.augment import AUGMENTATIONS, Augmentation
from trainer.data.datasets import TrainImages
from trainer.schedule import visit_uniforms

_GAP = 4
_HEADING = 18


def write_preview(
    images: TrainImages, path: Path, *, image_size: int, num_images: int = 4, num_views: int = 8, seed: int = 0
) -> None:
    """Writes a PNG: for each augmentation a heading and a row an image, the image itself first, then views of it.

    The images lie at even distances by id, so that of a folder of classes each is of another. The views of both
    augmentations are of the same uniform numbers.

    Raises:
        ValueError: a number out of range, or a path that is no .png.
        OSError: it cannot be written.
    """
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ValueError(f"{path} is no PNG in a folder that exists: give --output NAME.png")
    for name, number in (("images", num_images), ("views", num_views), ("image-size", image_size)):
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, got {number}")
    num_images = min(num_images, len(images))
    batch = images[torch.arange(num_images) * len(images) // num_images]  # uint8 (n, C, H, W)
    visits = np.arange(num_images * num_views)
    uniforms = torch.from_numpy(visit_uniforms(seed, visits, Augmentation.num_uniforms))
    side = max(image_size, batch.shape[-1])
    cell = side + _GAP
    block = _HEADING + num_images * cell
    picture = Image.new("RGB", (_GAP + (num_views + 1) * cell, len(AUGMENTATIONS) * block + _GAP), "white")
    draw = ImageDraw.Draw(picture)
    for number, (name, config) in enumerate(AUGMENTATIONS.items()):
        views = Augmentation(config, image_size)(batch.repeat_interleave(num_views, 0), uniforms)
        pixels = ((views + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        top = number * block
        draw.text((_GAP, top + _GAP), f"{name}: the image, and {num_views} views of {image_size} px", fill="black")
        for row in range(num_images):
            shown = [batch[row], *pixels[row * num_views : (row + 1) * num_views]]
            for column, one in enumerate(shown):
                left, above = _GAP + column * cell, top + _HEADING + row * cell
                picture.paste(Image.fromarray(_as_rgb(one)), (left, above))
    picture.save(path)


def _as_rgb(image: torch.Tensor) -> NDArray[np.uint8]:
    """uint8 [C, H, W], C 1 or 3, to [H, W, 3]."""
    pixels: NDArray[np.uint8] = image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    return pixels
