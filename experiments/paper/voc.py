"""Reads the annotated images of Pascal VOC in the folders of its archives.

VOC2007/ImageSets/Main/SPLIT.txt names the images of a split; each has Annotations/NAME.xml and JPEGImages/NAME.jpg.
The archives put the folders of the years into VOCdevkit.

An annotation gives the first and the last pixel of a box in each direction, counted from 1. Here a box is its edges in
pixels, so that pixel 1 reaches from 0 to 1: xmin − 1, ymin − 1, xmax, ymax, as in Detectron2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import ParseError, parse
from numpy.typing import NDArray
from PIL import Image, ImageOps

from experiments.paper.average_precision import Objects
from trainer.cores import decode_threads
from trainer.torchvision_schemas import import_module

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
"""The names of the classes; a label is an index in this tuple."""


@dataclass(frozen=True)
class VocImage:
    """An image's file and the objects on it."""

    path: Path
    width: int
    height: int
    objects: Objects


def read_split(root: Path, split: str) -> list[VocImage]:
    """The images of voc_YEAR_SPLIT, in the order of the split's file; only the headers of JPEGs are read.

    Args:
        root: the folder of VOCdevkit, or VOCdevkit itself.

    Raises:
        ValueError: a file is missing or damaged, or an annotation is not of VOC or does not fit its image.
    """
    parts = re.fullmatch(r"voc_(\d{4})_(\w+)", split)
    if parts is None:
        raise ValueError(f"split {split!r} is unknown: give voc_YEAR_SPLIT, such as voc_2007_trainval")
    place = root.parent if root.name == "VOCdevkit" else root
    try:
        found = import_module("torchvision.datasets").VOCDetection(place, parts[1], parts[2])
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{root} has no whole VOCdevkit/VOC{parts[1]} with {split} ({reason}): give --data-dir with VOC's unpacked "
            "archives"
        ) from None
    with ThreadPoolExecutor(decode_threads()) as pool:
        return list(pool.map(_read_image, map(Path, found.images), map(Path, found.targets)))


def load_pixels(image: VocImage) -> NDArray[np.uint8]:
    """The pixels of an image: uint8 [3, height, width]. Raises ValueError."""
    with _restored(image.path), Image.open(image.path) as picture:
        ImageOps.exif_transpose(picture, in_place=True)
        return np.ascontiguousarray(np.asarray(picture.convert("RGB")).transpose(2, 0, 1))


@contextmanager
def _restored(path: Path) -> Iterator[None]:
    """Raises ValueError, which names a file of VOC, for whatever is wrong with it."""
    try:
        yield
    except (OSError, SyntaxError, ParseError, DefusedXmlException, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is missing or damaged ({reason}): restore it from VOC's archive") from None


def _read_image(path: Path, annotation: Path) -> VocImage:
    with _restored(path), Image.open(path) as picture:
        ImageOps.exif_transpose(picture, in_place=True)  # which decodes a turned one only
        width, height = picture.size
    with _restored(annotation):
        found = [_read_object(element) for element in parse(annotation).getroot().findall("object")]
        boxes = np.array([box for box, _, _ in found]).reshape(-1, 4).clip(0, [width, height, width, height])
        if not (boxes[:, 2:] > boxes[:, :2]).all():  # NaN also fails
            raise ValueError(f"a box is empty or outside the {width}×{height} px image")
    objects = Objects(
        labels=np.array([label for _, label, _ in found], np.int64),
        boxes=boxes,
        difficult=np.array([difficult for _, _, difficult in found], bool),
    )
    return VocImage(path=path, width=width, height=height, objects=objects)


def _read_object(found: Any) -> tuple[list[float], int, bool]:
    """Box, label and difficulty of an object. Raises ValueError."""
    name = (found.findtext("name") or "").strip()
    if name not in CLASSES:
        raise ValueError(f"class {name!r} is unknown")
    left, top, right, bottom = (float(found.findtext(f"bndbox/{edge}")) for edge in ("xmin", "ymin", "xmax", "ymax"))
    return [left - 1, top - 1, right, bottom], CLASSES.index(name), found.findtext("difficult", "0").strip() == "1"
