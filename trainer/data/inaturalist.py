"""The annotation files of iNaturalist 2018: JSON with images, annotations and categories."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.data.idx import DataNotFoundError
from trainer.data.listing import Entry


@dataclass(frozen=True)
class Split:
    """The images of an annotation file, in its order."""

    entries: tuple[Entry, ...]
    classes: tuple[str, ...]
    """The categories' ids, in rising order; an image's label is the place of its category among them."""


def read_split(file: Path) -> Split:
    """Reads an annotation file; its images' paths are relative to its folder.

    Raises:
        DataNotFoundError: the file does not exist.
        ValueError: it is not an annotation file, or an image has no category, two, or an unknown one.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
        categories = sorted(int(category["id"]) for category in content["categories"])
        names = {int(image["id"]): str(image["file_name"]) for image in content["images"]}
        pairs = [(int(found["image_id"]), int(found["category_id"])) for found in content["annotations"]]
    except FileNotFoundError:
        raise DataNotFoundError(
            f"{file} does not exist: give the folder with train2018.json, val2018.json and train_val2018/"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not an annotation file of iNaturalist ({error!r}): download it again") from None
    numbers = {category: number for number, category in enumerate(categories)}
    labels: dict[int, int] = {}
    for image, category in pairs:
        if image in labels or image not in names or category not in numbers:
            reason = "twice" if image in labels else "with an unknown " + ("category" if image in names else "image")
            raise ValueError(f"{file} annotates image {image} {reason} (category {category}): download it again")
        labels[image] = numbers[category]
    if missing := names.keys() - labels.keys():
        raise ValueError(f"{file} has no category for {len(missing)} images, first {min(missing)}: download it again")
    entries = tuple(Entry(labels[image], -1, -1, _relative(name, file), "") for image, name in names.items())
    return Split(entries, tuple(map(str, categories)))


def _relative(name: str, file: Path) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{file} names the image {name!r}, outside its own folder: download it again")
    return str(path)
