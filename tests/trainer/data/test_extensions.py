"""A pack knows its source: what a command asks for otherwise is refused, and extensions keep what is packed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.helpers.image_tree import plain_tree
from tests.helpers.watching import once_within
from tests.trainer.data.written import write_table, write_tar
from trainer.data import load_dataset
from trainer.data.config import DataConfig, SourceOptions
from trainer.data.decoded_images import BrokenImages, DecodedImages, broken_line
from trainer.data.inspection import inspect_source
from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, pack
from trainer.data.packed import PackedImages


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return plain_tree(tmp_path / "tree", 6)


@pytest.mark.parametrize("split", ["train", "test"])
def test_broken_images_alone_are_not_added_until_one_can_be_read(split: str, tmp_path: Path) -> None:
    source, packed = tmp_path / "set", tmp_path / "packed"
    for name in ("train", "test"):
        plain_tree(source / name, 6)
    pack(source, packed, PackOptions())
    broken = source / split / "a/broken.jpg"
    broken.write_bytes(b"no image")
    with pytest.raises(ValueError, match=rf"none of 1 sampled images can be read, first .*/{split}/a/broken.jpg"):
        pack(source, packed, PackOptions(extend=True))
    shutil.copy(source / split / "b/0001.jpg", broken)
    pack(source, packed, PackOptions(extend=True))
    assert Manifest.load(packed if split == "train" else packed / "test").sizes == (6, 1)


def test_an_extension_renames_no_class(tmp_path: Path) -> None:
    """Of test images with a class that the training images lack, when the training images get others."""
    source, packed = tmp_path / "set", tmp_path / "packed"
    plain_tree(source / "train", 6)
    plain_tree(source / "test", 6)
    (source / "test/d").mkdir()
    shutil.copy(source / "test/a/0000.jpg", source / "test/d/0000.jpg")
    pack(source, packed, PackOptions())
    (source / "train/bb").mkdir()
    shutil.copy(source / "train/a/0000.jpg", source / "train/bb/0000.jpg")
    (source / "test/bb").mkdir()
    shutil.copy(source / "test/a/0003.jpg", source / "test/bb/0003.jpg")
    pack(source, packed, PackOptions(extend=True))
    assert Manifest.load(packed).classes == ("a", "b", "c", "bb")
    tests = PackedImages(packed / "test")
    names = [tests.manifest.classes[label] for label in tests.labels()]
    assert names == [Path(tests.path(image)).parent.name for image in range(len(tests))]
    assert names == ["a", "a", "b", "b", "c", "c", "d", "bb"]
    assert load_dataset("packed", packed).test_labels.tolist() == [0, 0, 1, 1, 2, 2, -1, 3], "no training image is a d"
    shutil.copytree(source / "test/d", source / "train/d")
    pack(source, packed, PackOptions(extend=True))
    dataset = load_dataset("packed", packed)
    assert dataset.class_names == ("a", "b", "c", "bb", "d")
    assert dataset.test_labels.tolist() == [0, 0, 1, 1, 2, 2, 4, 3], "as the training images number them"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"split": "none"}, "no --split, not --split none"),
        ({"stray": "use"}, "no --stray, not --stray use"),
        ({"tars": "shards"}, "no --tars, not --tars shards"),
        ({"label_key": "json"}, "no --label-key, not --label-key json"),
        ({"image_column": "x"}, "no --image-column, not --image-column x"),
        ({"split": "a", "label_column": "y"}, "no --split, not --split a, no --label-column, not --label-column y"),
        ({"pixel_range": (0, 4095)}, "no --pixel-range, not --pixel-range 0 4095"),
        ({"alpha": "ignore"}, "--alpha show, not --alpha ignore"),
    ],
)
def test_options_that_contradict_a_pack_are_refused(tree: Path, given: dict[str, object], said: str) -> None:
    """Where it is packed again and, but for those about pixels, where its images are loaded."""
    packed, options = tree.parent / "packed", SourceOptions(**given)  # type: ignore[arg-type]
    pack(tree, packed, PackOptions())
    with pytest.raises(ValueError, match=f"was packed with {said}: omit that, or give another directory"):
        pack(tree, packed, PackOptions(source=options))
    if options.of_pixels.given:
        assert load_dataset("packed", packed, options=options)
        return
    with pytest.raises(ValueError, match=f"was packed with {said}: omit that, or pack its source again"):
        load_dataset("packed", packed, options=options)


def test_an_option_that_is_said_counts_more_than_a_packs(tree: Path) -> None:
    """Also if it is the usual one; and an option that is not said does not, in a run either."""
    packed = tree.parent / "packed"
    pack(tree, packed, PackOptions(source=SourceOptions(alpha="ignore", max_megapixels=50, background="black")))
    for options, alpha, megapixels, background in (
        (DataConfig(), "ignore", 50, "black"),
        (SourceOptions(alpha="show"), "show", 50, "black"),
        (SourceOptions(max_megapixels=179), "ignore", 179, "black"),
        (DataConfig(background="white"), "ignore", 50, "white"),
    ):
        images = load_dataset("packed", packed, options=options).train_images
        assert isinstance(images, DecodedImages)
        found = images.options
        assert (found.alpha, found.max_megapixels, found.background) == (alpha, megapixels, background)
    pack(tree, tree.parent / "usual", PackOptions())
    pack(tree, tree.parent / "usual", PackOptions(source=SourceOptions(alpha="show")))


def test_shards_of_another_name_are_another_source(tree: Path) -> None:
    for name in ("a", "b"):
        write_tar(tree.parent / f"{name}-00000.tar", {"0.jpg": (tree / "a/0000.jpg").read_bytes()})
    packed = tree.parent / "packed"
    pack(tree.parent / "a-{00000..00000}.tar", packed, PackOptions())
    pack(tree.parent / "a-{00000..00000}.tar", packed, PackOptions())
    with pytest.raises(ValueError, match=r"holds images of .*a-\{00000..00000\}\.tar"):
        pack(tree.parent / "b-{00000..00000}.tar", packed, PackOptions())


def test_numbered_archives_are_compared_and_extended(tree: Path) -> None:
    images = {path.name: path.read_bytes() for path in tree.rglob("*.jpg")}
    names, packed = sorted(images), tree.parent / "packed"
    for last in (4, 6):
        for number, some in enumerate((names[:2], names[2:last])):
            write_tar(tree.parent / f"t-{number:05d}.tar", {name: images[name] for name in some})
        manifest = pack(tree.parent / "t-{00000..00001}.tar", packed, PackOptions(extend=last == 6))
    assert manifest.sizes == (4, 2)


def test_a_table_that_was_rewritten_is_not_extended(tmp_path: Path) -> None:
    """Its rows are known by their numbers alone: an image could be packed twice, and a new one not at all."""
    images = [path.read_bytes() for path in sorted(plain_tree(tmp_path / "tree", 7).rglob("*.jpg"))]
    source, packed = tmp_path / "tables", tmp_path / "packed"
    write_table(source / "a.parquet", image=images[:6])
    pack(source, packed, PackOptions())
    write_table(source / "a.parquet", image=images[::-1])
    with pytest.raises(ValueError, match=f"^{source}/a.parquet was rewritten with more rows since it was packed, so"):
        pack(source, packed, PackOptions(extend=True))
    write_table(source / "a.parquet", image=images[5::-1])
    write_table(source / "b.parquet", image=images[6:])
    assert pack(source, packed, PackOptions(extend=True)).sizes == (6, 1)
    assert [PackedImages(packed).read(image) for image in range(7)] == images


def test_a_broken_image_is_listed_once(tree: Path) -> None:
    (tree / "a/text.jpg").write_bytes(b"no image")
    options = SourceOptions(broken_list=tree.parent / "broken.txt")
    for _ in range(2):
        list(inspect_source(tree, options))
        images = load_dataset("folder", tree, options=options).train_images
        images[:]
    expected = f"{tree}/a/text.jpg\tnot an image of a known format\n"
    assert (tree.parent / "broken.txt").read_text() == expected


def test_a_long_list_of_broken_images_is_read_once(tmp_path: Path) -> None:
    """And what other processes add to it, so that no line comes twice."""

    def seconds(attempt: int) -> float:
        options = SourceOptions(broken_list=tmp_path / f"{attempt}.txt", max_broken=10**6)
        mine, others = (BrokenImages(options, 10**6) for _ in range(2))
        began = time.monotonic()
        for number in range(6_000):
            (mine, others)[number % 2].note(number, line := broken_line(f"é{number}.jpg", OSError("cut off")))
            (others, mine)[number % 2].list([line])
        taken = time.monotonic() - began
        lines = [f"é{number}.jpg\tcut off" for number in range(6_000)]
        assert (tmp_path / f"{attempt}.txt").read_text(encoding="utf-8").splitlines() == lines
        return taken

    once_within(2, seconds)
