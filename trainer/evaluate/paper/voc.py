"""Reads the annotated images of Pascal VOC in the folders of its archives.

VOC2007/ImageSets/Main/SPLIT.txt names the images of a split; each has Annotations/NAME.xml and JPEGImages/NAME.jpg.
The archives put the folders of the years into VOCdevkit.

An annotation gives the first and the last pixel of a box in each direction, counted from 1. Here a box is its edges in
pixels, so that pixel 1 reaches from 0 to 1: xmin − 1, ymin − 1, xmax, ymax, as in Detectron2.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import ParseError, parse
from numpy.typing import NDArray

from trainer.cores import decode_threads
from trainer.data.decode import BrokenImageError, decode_whole, upright_size
from trainer.evaluate.paper.average_precision import Float64Array, Objects
from trainer.torchvision_schemas import import_module

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
"""The names of the classes; a label is an index in this tuple."""
_TOLERANCE = 1.0
"""Pixels by which a box may exceed its image, for tools that count pixels from 0; such a box is clipped."""


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
    try:
        return decode_whole(image.path.read_bytes(), (image.height, image.width))
    except (OSError, BrokenImageError) as error:
        raise _broken(image.path, error) from None


def _broken(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be decoded ({error}): restore it from VOC's archive")


def _read_image(path: Path, annotation: Path) -> VocImage:
    for file in (path, annotation):
        if not file.is_file():
            raise ValueError(f"{file} is missing: unpack VOC's archive again")
    try:
        width, height = upright_size(path)
    except (OSError, BrokenImageError) as error:
        raise _broken(path, error) from None
    try:
        root = parse(annotation).getroot()
        found = [_read_object(element) for element in root.findall("object")]
        declared = [float(size.text) for size in root.findall("size/*")[:2]]
    except (ParseError, DefusedXmlException, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{annotation} is not an annotation of VOC ({reason}): restore it") from None
    if declared and declared != [width, height]:
        raise ValueError(
            f"{annotation} is for {declared[0]:g}×{declared[1]:g} px, but {path.name} has {width}×{height}"
        )
    boxes = np.array([box for box, _, _ in found]).reshape(-1, 4)
    for box in boxes:
        _check_box(annotation, box, width, height)
    objects = Objects(
        labels=np.array([label for _, label, _ in found], np.int64),
        boxes=boxes.clip(0, [width, height, width, height]),
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


def _check_box(annotation: Path, box: Float64Array, width: int, height: int) -> None:
    left, top, right, bottom = box.tolist()
    inside = min(left, top) >= -_TOLERANCE and right <= width + _TOLERANCE and bottom <= height + _TOLERANCE
    if not (inside and min(right, width) > max(left, 0) and min(bottom, height) > max(top, 0)):  # NaN also fails
        raise ValueError(
            f"{annotation} has a box from ({left + 1:g}, {top + 1:g}) to ({right:g}, {bottom:g}), which is empty or "
            f"outside the {width}×{height} px image: correct it"
        )
