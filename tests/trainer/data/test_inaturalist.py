"""iNaturalist 2018's annotation files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainer.data import load_dataset

CATEGORIES = [{"id": 4, "name": "Abies"}, {"id": 2, "name": "Bufo"}, {"id": 9, "name": "Corvus"}]


def annotation_file(images: dict[int, tuple[str, int]]) -> dict[str, Any]:
    return {
        "images": [{"id": image, "file_name": name} for image, (name, _) in images.items()],
        "annotations": [
            {"id": image, "image_id": image, "category_id": category} for image, (_, category) in images.items()
        ],
        "categories": CATEGORIES,
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    train = {10 + number: (f"train_val2018/Aves/{number}/{number}.jpg", (2, 4, 9)[number % 3]) for number in range(7)}
    val = {90 + number: (f"train_val2018/Aves/9/val{number}.jpg", (9, 2)[number]) for number in range(2)}
    for name, images in (("train", train), ("val", val)):
        (tmp_path / f"{name}2018.json").write_text(json.dumps(annotation_file(images)))
        for number, (file, _) in enumerate(images.values()):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((40, 50, 3), 20 * number, np.uint8)).save(tmp_path / file)
    return tmp_path


def test_images_and_labels(directory: Path) -> None:
    dataset = load_dataset("inaturalist-2018", directory, image_size=28)
    assert dataset.train_labels.tolist() == [0, 1, 2, 0, 1, 2, 0], "categories are numbered by their ids"
    assert dataset.test_labels.tolist() == [2, 0]
    levels = dataset.train_images[:].float().mean(dim=(1, 2, 3))
    assert levels.tolist() == pytest.approx([20 * number for number in range(7)], abs=2)
    assert dataset.evaluated_side == 28


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found["annotations"].pop(3), "one category for each of its images: download it again"),
        (lambda found: found["annotations"].append(found["annotations"][0]), "one category for each of its images"),
        (lambda found: found["annotations"][0].update(image_id=999), "one category for each of its images"),
        (
            lambda found: found["annotations"][0].update(category_id=3),
            r"is not an annotation file .* \(KeyError\(3\)\)",
        ),
        (lambda found: found["images"][0].update(file_name="../../secret.jpg"), "outside its own folder"),
        (lambda found: found["images"][0].update(file_name="/etc/passwd"), "outside its own folder"),
        (lambda found: found.pop("categories"), "is not an annotation file of iNaturalist"),
    ],
)
def test_rejects_damaged_annotations(directory: Path, change: Any, message: str) -> None:
    file = directory / "train2018.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as raised:
        load_dataset("inaturalist-2018", directory)
    assert "\n" not in str(raised.value)


def test_rejects_missing_and_cut_files(directory: Path) -> None:
    (directory / "train2018.json").write_text('{"images": [')
    with pytest.raises(ValueError, match="is not an annotation file"):
        load_dataset("inaturalist-2018", directory)
    (directory / "train2018.json").unlink()
    with pytest.raises(ValueError, match=r"train2018.json does not exist: give the folder with"):
        load_dataset("inaturalist-2018", directory)


def test_a_missing_image_is_an_error_in_an_evaluation(directory: Path) -> None:
    (directory / "train_val2018/Aves/9/val1.jpg").unlink()
    dataset = load_dataset("inaturalist-2018", directory, image_size=28).strict()
    with pytest.raises(ValueError, match=r"broken image: .*val1.jpg .*No such file"):
        dataset.test_images[:]
