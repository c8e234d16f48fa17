"""The annotation files of iNaturalist 2018: JSON with images, annotations and categories."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.data.listing import Entry, Listing
from trainer.data.reading import Split


def read_split(file: Path) -> Split:
    """Reads an annotation file; its images' paths are relative to its folder.

    The classes are the categories' ids, in rising order.

    Raises:
        ValueError: no such file, or not an annotation file; an image has no category, two, or an unknown one.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
        categories = sorted(int(category["id"]) for category in content["categories"])
        names = {int(image["id"]): str(image["file_name"]) for image in content["images"]}
        numbers = {category: number for number, category in enumerate(categories)}
        pairs = [(int(found["image_id"]), numbers[int(found["category_id"])]) for found in content["annotations"]]
    except FileNotFoundError:
        raise ValueError(
            f"{file} does not exist: give the folder with train2018.json, val2018.json and train_val2018/"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not an annotation file of iNaturalist ({error!r}): download it again") from None
    labels = dict(pairs)
    if len(labels) < len(pairs) or labels.keys() != names.keys():
        raise ValueError(f"{file} does not name one category for each of its images: download it again")
    for name in names.values():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{file} names the image {name!r}, outside its own folder: download it again")
    lines = (Entry(labels[image], -1, -1, str(PurePosixPath(name)), "").line() for image, name in names.items())
    return Split(
        name="",
        source=str(file),
        listing=Listing(b"".join(lines), file.parent),
        classes=tuple(map(str, categories)),
        counts=Counter(labels.values()),
    )
