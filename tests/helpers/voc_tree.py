"""Small trees in the folders of Pascal VOC: JPEGs of coloured squares on noise, with their annotations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"bird": (220, 40, 30), "cat": (30, 60, 230)}
"""Classes and the colours of their squares."""


def annotation(boxes: Sequence[tuple[str, tuple[float, ...], bool]], *, width: int = 96, height: int = 72) -> str:
    """The XML of (class, xmin ymin xmax ymax, difficult), whose pixels are counted from 1."""
    objects = "".join(
        f"<object><name>{name}</name><pose>Left</pose><truncated>0</truncated><difficult>{int(difficult)}</difficult>"
        f"<bndbox><xmin>{box[0]:g}</xmin><ymin>{box[1]:g}</ymin><xmax>{box[2]:g}</xmax><ymax>{box[3]:g}</ymax></bndbox>"
        "</object>"
        for name, box, difficult in boxes
    )
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><folder>VOC2007</folder>{size}<segmented>0</segmented>{objects}</annotation>"


def split(root: Path, year: int, name: str, num_images: int, seed: int = 0) -> list[str]:
    """Adds a split of `num_images` images: one or two squares on each, some high, some wide, some squares difficult."""
    folder = root / f"VOCdevkit/VOC{year}"
    for part in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    names = [f"{name[:2]}{number:06d}" for number in range(num_images)]
    for number, image_name in enumerate(names):
        random = np.random.default_rng([seed, year, number])
        width, height = (96, 72) if number % 3 else (72, 96)
        pixels = random.integers(90, 150, (height, width, 3)).astype(np.uint8)
        boxes = []
        for place in range(1 + number % 2):  # on halves of the image, so that they do not overlap
            side = int(random.integers(24, 34))
            left = int(random.integers(1, width // 2 - side + 1)) + place * (width // 2)
            top = int(random.integers(1, height - side))
            label = list(COLOURS)[int(random.integers(2))]
            right, bottom = min(left + side - 1, width), top + side - 1
            pixels[top - 1 : bottom, left - 1 : right] = COLOURS[label]
            boxes.append((label, (left, top, right, bottom), number % 5 == 4 and place == 0))
        Image.fromarray(pixels).save(folder / f"JPEGImages/{image_name}.jpg", quality=95)
        (folder / f"Annotations/{image_name}.xml").write_text(annotation(boxes, width=width, height=height))
    (folder / f"ImageSets/Main/{name}.txt").write_text("".join(f"{image_name}\n" for image_name in names))
    return names


def tree(root: Path, num_train: int = 12, num_test: int = 7) -> Path:
    """trainval and test of 2007, and a trainval of 2012 of half the size."""
    split(root, 2007, "trainval", num_train)
    split(root, 2012, "trainval", num_train // 2, seed=1)
    split(root, 2007, "test", num_test, seed=2)
    return root
