"""Reading Pascal VOC's folders: boxes as edges, and one line for each kind of bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from experiments.paper.detect import read_splits
from experiments.paper.settings import DetectConfig
from experiments.paper.voc import CLASSES, load_pixels, read_split
from tests.helpers import voc_tree
from tests.helpers.image_tree import ORIENTATION

SPLIT = "voc_2007_test"
CONFIG = DetectConfig(batch_size=2)


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    return voc_tree.tree(tmp_path)


def files(devkit: Path, name: str = "te000001") -> tuple[Path, Path]:
    """Annotation and JPEG of a test image, of 96×72 pixels."""
    folder = devkit / "VOCdevkit/VOC2007"
    return folder / f"Annotations/{name}.xml", folder / f"JPEGImages/{name}.jpg"


def test_reads_boxes_as_edges(devkit: Path) -> None:
    xml, _ = files(devkit)
    xml.write_text(voc_tree.annotation([("cat", (0, 0, 97, 73), False), ("tvmonitor", (3, 10, 3, 12.5), True)]))
    image = read_split(devkit, SPLIT)[1]
    assert (image.width, image.height) == (96, 72)
    assert image.objects.boxes.tolist() == [[0, 0, 96, 72], [2, 9, 3, 12.5]]
    assert [CLASSES[label] for label in image.objects.labels] == ["cat", "tvmonitor"]
    assert image.objects.difficult.tolist() == [False, True]
    assert read_split(devkit / "VOCdevkit", SPLIT)[1].path == image.path


def test_a_part_of_an_object_is_not_an_object(devkit: Path) -> None:
    """As of people in 2012."""
    xml, _ = files(devkit)
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
    xml.write_text(voc_tree.annotation([("cat", (1, 1, 9, 9), False)]).replace("<pose>", part + "<pose>"))
    assert read_split(devkit, SPLIT)[1].objects.boxes.tolist() == [[0, 0, 9, 9]]


def test_images_without_objects_are_tested_but_not_trained_on(devkit: Path) -> None:
    for name in ("tr000001", "te000001"):
        files(devkit, name)[0].write_text(voc_tree.annotation([]))
    train, test = read_splits(devkit, CONFIG)
    assert (len(train), len(test)) == (11 + 6, 7)
    assert not len(test[1].objects.labels)


def test_turns_an_image_upright(devkit: Path) -> None:
    xml, jpeg = files(devkit)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    with Image.open(jpeg) as image:
        image.save(jpeg, exif=exif)
    xml.write_text(voc_tree.annotation([("cat", (1, 1, 72, 96), False)], width=72, height=96))
    image_of_voc = read_split(devkit, SPLIT)[1]
    assert (image_of_voc.width, image_of_voc.height) == (72, 96)
    assert load_pixels(image_of_voc).shape == (3, 96, 72)


Damage = Callable[[Path, Path], object]
"""Changes an annotation and its JPEG."""


def replaced(old: str, new: str) -> Damage:
    return lambda xml, jpeg: xml.write_text(xml.read_text().replace(old, new))


def boxed(*box: float) -> Damage:
    return lambda xml, jpeg: xml.write_text(voc_tree.annotation([("cat", box, False)]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda xml, jpeg: xml.unlink(), r"te000001\.xml is missing or damaged \("),
        (lambda xml, jpeg: jpeg.unlink(), r"te000001\.jpg is missing or damaged \("),
        (lambda xml, jpeg: jpeg.write_text("no picture"), r"te000001\.jpg is missing or damaged \(cannot identify"),
        (lambda xml, jpeg: xml.write_text("<annotation>"), r"te000001\.xml is missing or damaged \(no element"),
        (
            lambda xml, jpeg: xml.write_text('<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'),
            r"te000001\.xml is missing or damaged \(EntitiesForbidden",
        ),
        (replaced("<name>", "<name>un"), r"te000001\.xml is .* \(class 'un(bird|cat)' is unknown\): restore it"),
        (replaced("xmax", "xright"), r"te000001\.xml is missing or damaged \("),
        (boxed(20, 1, 19, 72), r"a box is empty or outside the 96×72 px image"),
        (boxed(97, 1, 99, 72), r"a box is empty or outside the 96×72 px image"),
        (boxed(float("nan"), 1, 9, 72), r"a box is empty or outside the 96×72 px image"),
    ],
)
def test_rejects_damaged_files(devkit: Path, damage: Damage, message: str) -> None:
    damage(*files(devkit))
    with pytest.raises(ValueError, match=message) as caught:
        read_split(devkit, SPLIT)
    assert "\n" not in str(caught.value)


def test_rejects_missing_splits(devkit: Path) -> None:
    for split in ("voc_2008_trainval", "voc_2012_test", "voc_2012_train"):
        with pytest.raises(ValueError, match=rf"has no whole VOCdevkit/VOC20.* with {split} \(.*\): give --data-dir"):
            read_split(devkit, split)
    for name in ("test", "voc_07_test"):
        with pytest.raises(ValueError, match=f"split '{name}' is unknown: give voc_YEAR_SPLIT"):
            read_split(devkit, name)


def test_rejects_a_truncated_image(devkit: Path) -> None:
    _, jpeg = files(devkit)
    jpeg.write_bytes(jpeg.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"te000001\.jpg is missing or damaged \(.*truncated.*\): restore it"):
        load_pixels(read_split(devkit, SPLIT)[1])


def test_rejects_a_test_without_objects_to_find(devkit: Path) -> None:
    for name in (f"te{number:06d}" for number in range(7)):
        xml, _ = files(devkit, name)
        xml.write_text(xml.read_text().replace("<difficult>0", "<difficult>1"))
    with pytest.raises(ValueError, match="voc_2007_test has no objects to find"):
        read_splits(devkit, CONFIG)
