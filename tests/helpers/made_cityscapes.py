"""A tiny Cityscapes with its folders and file names: road, sky and car are regions of their own colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {7: (200, 40, 40), 23: (40, 200, 40), 26: (40, 40, 200), 0: (0, 0, 0)}
"""Colour by label id: road, sky, car; unlabelled pixels are black."""
CITY = "ulm"


def file_names(directory: Path, split: str, number: int) -> tuple[Path, Path]:
    """The files of an image and of its labels."""
    name = f"{CITY}_{number:06}_000019"
    return (
        directory / "leftImg8bit" / split / CITY / f"{name}_leftImg8bit.png",
        directory / "gtFine" / split / CITY / f"{name}_gtFine_labelIds.png",
    )


def make_split(directory: Path, split: str, count: int, *, seed: int, size: tuple[int, int] = (96, 64)) -> None:
    """Makes `count` images of this width and height: a road, sky on the right, and a car at the bottom left."""
    generator, (width, height) = np.random.default_rng(seed), size
    for number in range(count):
        ids = np.full((height, width), 7, np.uint8)
        ids[:, generator.integers(width // 3, 2 * width // 3) :] = 23
        ids[generator.integers(height // 3, 2 * height // 3) :, : width // 2] = 26
        ids[:2] = 0
        pixels = generator.integers(0, 40, (height, width, 3))
        for label, colour in COLOURS.items():
            pixels[ids == label] += colour
        pictures = (Image.fromarray(pixels.astype(np.uint8)), Image.fromarray(ids))
        for path, picture in zip(file_names(directory, split, number), pictures, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)


def make_cityscapes(directory: Path, *, num_train: int = 6, num_val: int = 3) -> Path:
    make_split(directory, "train", num_train, seed=0)
    make_split(directory, "val", num_val, seed=1)
    return directory
