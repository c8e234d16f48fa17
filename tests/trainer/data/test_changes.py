"""A pack knows its source: what the source says otherwise now, and what a command asks for otherwise, is named."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from tests.helpers.image_tree import plain_tree
from trainer.data import load_dataset
from trainer.data.changes import changes_since
from trainer.data.config import DataConfig, SourceOptions
from trainer.data.decoded_images import DecodedImages
from trainer.data.inspection import inspect_source
from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, pack
from trainer.data.packed import PackedImages
from trainer.data.reading import read_source
from trainer.own_images import images_config
from trainer.own_packs import check_same_source, packed_beside


def write_list(path: Path, labels: list[str]) -> Path:
    """A list of as many images as labels, in a folder beside it."""
    names = sorted(str(one.relative_to(path.parent)) for one in (path.parent / "tree").rglob("*.jpg"))
    path.write_text("".join(f"{name} {label}\n" for name, label in zip(names, labels, strict=True)))
    return path


def beside(source: Path) -> Path:
    """The pack beside a run on a source."""
    return packed_beside(source, source.parent / "runs/run", 0, DataConfig(data_dir=source))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return plain_tree(tmp_path / "tree", 6)


def test_a_run_never_uses_a_pack_with_old_labels(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list that gets labels, other labels, other names of them, and the same again."""
    path, packs = tree.parent / "list.txt", list[Path]()
    for labels in (
        ["-1"] * 6,
        ["0", "1"] * 3,
        ["1", "0"] * 3,
        ["cat", "dog"] * 3,
        ["dog", "cat"] * 3,
        ["dog", "cat"] * 2 + ["dog", "-1"],
    ):
        packs.append(beside(write_list(path, labels)))
        plain, packed = load_dataset("folder", path), load_dataset("packed", packs[-1])
        assert torch.equal(packed.train_labels, plain.train_labels)
        assert packed.class_names == plain.class_names
        assert beside(path) == packs[-1], "the same again"
    assert len(set(packs)) == 6
    said = capsys.readouterr().err
    assert f"{packs[0]} is not used: it has no labels, {path} labels by number" in said
    assert f"{packs[1]} is not used: 6 labelled anew since (tree/a/0000.jpg, " in said
    assert f"{packs[2]} is not used: it has labels by number, {path} labels by name" in said


@pytest.mark.parametrize("split", ["train", "test"])
def test_broken_images_alone_are_not_added_until_one_can_be_read(
    split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("train", "test"):
        plain_tree(tmp_path / "set" / name, 6)
    packed = beside(tmp_path / "set")
    broken = tmp_path / "set" / split / "a/broken.jpg"
    broken.write_bytes(b"no image")
    assert beside(tmp_path / "set") == packed
    assert (
        f"1 added since ({split}/a/broken.jpg), but none can be read: repair or remove them" in capsys.readouterr().err
    )
    broken.unlink()
    assert beside(tmp_path / "set") == packed
    shutil.copy(tmp_path / "set" / split / "b/0001.jpg", broken)
    assert beside(tmp_path / "set") == packed
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


def test_classes_of_training_and_test_images_get_one_number_in_an_extension(tmp_path: Path) -> None:
    source, packed = tmp_path / "set", tmp_path / "packed"
    for split in ("train", "test"):
        plain_tree(source / split, 6)
    pack(source, packed, PackOptions())
    for split in ("train", "test"):
        for name in ("0", "bb"):
            shutil.copytree(source / split / "a", source / split / name)
    shutil.rmtree(source / "test/0")
    pack(source, packed, PackOptions(extend=True))
    dataset = load_dataset("packed", packed)
    assert dataset.class_names == ("a", "b", "c", "0", "bb")
    assert dataset.test_labels.tolist() == [0, 0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"split": "none"}, "no --split, not --split none"),
        ({"stray": "use"}, "no --stray, not --stray use"),
        ({"tars": "shards"}, "no --tars, not --tars shards"),
        ({"label_key": "json"}, "no --label-key, not --label-key json"),
        (
            {"image_column": "x", "label_column": "y"},
            "no --image-column, not --image-column x, no --label-column, not --label-column y",
        ),
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


def test_a_pack_of_another_version_is_left_as_it_is(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = beside(tree)
    (first / "manifest.json").write_text('{"format": 3}')
    assert beside(tree).name == "tree-packed-2"
    assert f"{first} is not used: {first}/manifest.json is of another version" in capsys.readouterr().err


def test_an_option_that_is_said_counts_more_than_a_packs(tree: Path) -> None:
    """Also if it is the usual one; and an option that is not said does not."""
    packed = tree.parent / "packed"
    pack(tree, packed, PackOptions(source=SourceOptions(alpha="ignore", max_megapixels=50)))
    for options, alpha, megapixels in (
        (SourceOptions(), "ignore", 50),
        (SourceOptions(alpha="show"), "show", 50),
        (SourceOptions(max_megapixels=179), "ignore", 179),
    ):
        images = load_dataset("packed", packed, options=options).train_images
        assert isinstance(images, DecodedImages)
        assert (images.options.alpha, images.options.max_megapixels) == (alpha, megapixels)
    pack(tree, tree.parent / "usual", PackOptions())
    pack(tree, tree.parent / "usual", PackOptions(source=SourceOptions(alpha="show")))


def test_shards_of_another_name_are_another_source(tree: Path) -> None:
    for name in ("a", "b"):
        with tarfile.open(tree.parent / f"{name}-00000.tar", "w") as tar:
            tar.add(tree / "a/0000.jpg", "0.jpg")
    packed = tree.parent / "packed"
    pack(tree.parent / "a-{00000..00000}.tar", packed, PackOptions())
    check_same_source(tree.parent / "a-{00000..00000}.tar", packed)
    with pytest.raises(ValueError, match=r"the run's images are packed from .*a-\{00000..00000\}\.tar"):
        check_same_source(tree.parent / "b-{00000..00000}.tar", packed)


def test_test_images_that_a_source_has_no_more_are_removed(tmp_path: Path) -> None:
    source = tmp_path / "set"
    (tmp_path / "runs").mkdir()
    for name in ("train", "val"):
        plain_tree(source / name, 6)
    first = beside(source)
    assert len(load_dataset("packed", first).test_images) == 6
    shutil.rmtree(source / "val")
    assert changes_since(read_source(source), first).lines()[0].startswith("6 removed since (")
    second = beside(source)
    assert (second.name, len(load_dataset("packed", second).test_images)) == ("set-packed-2", 0)
    plain_tree(source / "val", 6)
    assert beside(source) == first, "with the images that came back"


def test_test_images_of_another_source_are_its_own(tree: Path) -> None:
    packed = tree.parent / "packed"
    pack(tree, packed, PackOptions())
    pack(plain_tree(tree.parent / "others", 3), packed / "test", PackOptions())
    assert changes_since(read_source(tree), packed).lines() == []


def test_a_list_with_a_missing_file_is_packed_once(tree: Path) -> None:
    """Until the file is there."""
    path = write_list(tree.parent / "list.txt", ["0", "1"] * 3)
    path.write_text(path.read_text() + "tree/a/gone.jpg 1\n")
    first = beside(path)
    assert len(PackedImages(first)) == len(load_dataset("folder", path).train_images) == 7
    assert beside(path) == first
    shutil.copy(tree / "a/0000.jpg", tree / "a/gone.jpg")
    (line,) = changes_since(read_source(path), first).lines()
    assert line.startswith("1 changed since (tree/a/gone.jpg): ")
    path.write_text(path.read_text() + "tree/a/later.jpg 1\n")
    assert changes_since(read_source(path), first).lines() == [line], "one that has no file yet is not added"
    (tree / "b/0001.jpg").unlink()
    assert changes_since(read_source(path), first).outdated() == (
        "1 removed since (tree/b/0001.jpg), 1 changed since (tree/a/gone.jpg)"
    )


def test_a_list_is_packed_for_a_run(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.parent)
    write_list(tree.parent / "list.txt", ["0", "1"] * 3)
    config = images_config(["--data-dir", "list.txt", "--dataset", "packed", "--device", "cpu"])
    assert config.data.data_dir == Path("runs/list-packed")
    assert len(PackedImages(Path("runs/list-packed"))) == 6


def test_copies_of_a_removed_image_are_one_renamed_and_one_added(tree: Path) -> None:
    packed = tree.parent / "packed"
    pack(tree, packed, PackOptions())
    for name in ("x", "y"):
        shutil.copy(tree / "a/0000.jpg", tree / f"a/{name}.jpg")
    (tree / "a/0000.jpg").unlink()
    manifest = pack(tree, packed, PackOptions(extend=True))
    assert manifest.sizes == (6, 1)
    assert changes_since(read_source(tree), packed).added == []


def test_numbered_archives_are_compared_and_extended(tmp_path: Path) -> None:
    paths = sorted(plain_tree(tmp_path / "tree", 6).rglob("*.jpg"))
    source, packed = tmp_path / "t-{00000..00001}.tar", tmp_path / "packed"
    for last in (4, 6):
        for number, some in enumerate((paths[:2], paths[2:last])):
            with tarfile.open(tmp_path / f"t-{number:05d}.tar", "w") as tar:
                for path in some:
                    tar.add(path, path.name)
        manifest = pack(source, packed, PackOptions(extend=last == 6))
    assert manifest.sizes == (4, 2)


def test_a_broken_image_is_listed_once(tree: Path) -> None:
    (tree / "a/text.jpg").write_bytes(b"no image")
    options = SourceOptions(broken_list=tree.parent / "broken.txt")
    for _ in range(2):
        list(inspect_source(tree, options))
        images = load_dataset("folder", tree, options=options).train_images
        images[:]
    expected = f"{tree}/a/text.jpg\tnot an image of a known format\n"
    assert (tree.parent / "broken.txt").read_text() == expected
