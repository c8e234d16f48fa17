"""Listing a source: its images, their order and labels."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.image_tree import odd_tree, plain_tree
from trainer.data.datasets import load_dataset
from trainer.data.decoded_images import DecodedImages
from trainer.data.listing import ImageSource, Listing, listing_lines
from trainer.data.pack import PackOptions, pack
from trainer.data.tree import LeftOut


def listed(source: Path, **options: object) -> tuple[Listing, ImageSource]:
    found = ImageSource(source, **options)  # type: ignore[arg-type]
    return Listing(b"".join(listing_lines(found.entries())), found.root), found


def paths(listing: Listing) -> list[str]:
    return [entry.path for entry in listing.entries()]


def test_a_tree_of_classes(tmp_path: Path) -> None:
    listing, found = listed(odd_tree(tmp_path, num_images=9))
    expected = sorted(
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
        if path.is_file() and path.suffix != ".txt" and not path.name.startswith(".")
    )
    assert paths(listing) == expected
    assert found.classes == ["a", "b", "c"]
    assert listing.labels().tolist() == ["abc".index(path[0]) for path in expected]
    assert [listing.read(i) for i in range(len(listing))] == [(tmp_path / path).read_bytes() for path in expected]


def test_images_next_to_folders_have_no_labels(tmp_path: Path) -> None:
    plain_tree(tmp_path, 4)
    (tmp_path / "at the root.JPEG").write_bytes(b"x")
    listing, found = listed(tmp_path)
    assert not found.labelled
    assert set(listing.labels().tolist()) == {-1}
    assert len(listing) == 5
    assert "at the root.JPEG" in paths(listing)


def test_labels_can_be_discarded(tmp_path: Path) -> None:
    _, found = listed(plain_tree(tmp_path, 4), labelled=False)
    assert (found.labelled, found.classes) == (False, [])


def test_known_classes_keep_their_numbers(tmp_path: Path) -> None:
    listing, found = listed(plain_tree(tmp_path, 3), classes=["z", "b"])
    assert found.classes == ["z", "b", "a", "c"]
    assert listing.labels().tolist() == [2, 1, 3]


def test_tars_of_synsets_are_like_folders(tmp_path: Path) -> None:
    tree, tars = plain_tree(tmp_path / "tree", 9), tmp_path / "tars"
    tars.mkdir()
    for folder in sorted(tree.iterdir()):
        with tarfile.open(tars / f"{folder.name}.tar", "w") as tar:
            for path in sorted(folder.iterdir()):
                tar.add(path, arcname=path.name)
    (plain, a), (packed, b) = listed(tree), listed(tars)
    assert a.classes == b.classes
    assert np.array_equal(plain.labels(), packed.labels())
    assert [plain.read(i) for i in range(9)] == [packed.read(i) for i in range(9)]
    assert packed.name(0) == f"{tars}/a.tar:0000.jpg"


def test_a_damaged_tar_is_named(tmp_path: Path) -> None:
    (tmp_path / "n01440764.tar").write_bytes(b"half a tar" * 200)
    with pytest.raises(ValueError, match=r"n01440764.tar is not a complete tar"):
        listed(tmp_path)


def test_lists(tmp_path: Path) -> None:
    tree = plain_tree(tmp_path / "tree", 3)
    text = tmp_path / "list.txt"
    text.write_text(f"tree/b/0001.jpg 4\n\n{tree}/a/0000.jpg\t0\n")
    listing, found = listed(text)
    assert found.labelled
    assert listing.labels().tolist() == [4, 0]
    assert listing.read(0) == (tree / "b/0001.jpg").read_bytes()
    assert listing.read(1) == (tree / "a/0000.jpg").read_bytes()
    text.write_text("tree/b/0001.jpg\ntree/a/with blanks.jpg\n")
    listing, found = listed(text)
    assert not found.labelled
    assert paths(listing) == ["tree/b/0001.jpg", "tree/a/with blanks.jpg"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a.jpg", "give all images a number"),
        ("a.jpg\tcat", "give all images a number"),
        ("a.jpg\t-1", "give all images a number"),
        (f"a.jpg {'9' * 20}", "give labels of at most 18 digits"),
        (f"a.jpg {'9' * 5_000}", "give labels of at most 18 digits"),
        ("# a.jpg 1", "comments are not supported"),
    ],
)
def test_a_lists_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "list.txt").write_text(f"b.jpg 1\n{line}\n")
    with pytest.raises(ValueError, match=f"list.txt, line 2: .*{message}") as caught:
        listed(tmp_path / "list.txt")
    assert len(str(caught.value)) < len(str(tmp_path)) + 120


def test_a_list_with_a_byte_order_mark_and_a_line_again(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("\ufeffa.jpg 3\nb.jpg 4\n./a.jpg 3\na.jpg 3\n")
    listing, _ = listed(tmp_path / "list.txt")
    assert paths(listing) == ["a.jpg", "b.jpg"]
    assert listing.labels().tolist() == [3, 4]


def left_out_of(source: Path) -> str:
    left_out = LeftOut()
    list(listing_lines(ImageSource(source).entries(left_out), left_out))
    return left_out.line(source).removeprefix(f"left out of {source}: ")


def test_links_double_no_image(tmp_path: Path) -> None:
    tree = plain_tree(tmp_path / "tree", 6)
    once = paths(listed(tree)[0])
    (tree / "a/loop").symlink_to("..")
    (tree / "0 linked folder").symlink_to("b")  # listed before what it leads to
    (tree / "c/linked file.jpg").symlink_to("../a/0000.jpg")
    (tree / "self").symlink_to("self")
    listing, found = listed(tree)
    assert (paths(listing), found.classes) == (once, ["a", "b", "c"])
    assert left_out_of(tree) == "3 links to what is listed anyway (first 0 linked folder)"


def test_linked_folders_outside_are_listed_once(tmp_path: Path) -> None:
    tree, outside = plain_tree(tmp_path / "tree", 3), plain_tree(tmp_path / "outside", 3, first=3)
    (outside / ".hidden").mkdir()
    (outside / ".hidden/x.jpg").write_bytes(b"x")
    (outside / "a/back").symlink_to(tree)
    (tree / "d").symlink_to(outside / "a")
    (tree / "e").symlink_to(outside)
    (tree / "f").symlink_to(outside / "b")
    (tree / "c/kept.jpg").symlink_to(outside / ".hidden/x.jpg")
    listing, found = listed(tree)
    files = ["d/0003.jpg", "e/b/0004.jpg", "e/c/0005.jpg"]
    assert paths(listing) == ["a/0000.jpg", "b/0001.jpg", "c/0002.jpg", "c/kept.jpg", *files]
    assert found.classes == ["a", "b", "c", "d", "e"]
    assert left_out_of(tree) == "3 links to what is listed anyway (first d/back)"


def test_missing_and_empty_files_are_left_out_and_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = plain_tree(tmp_path / "tree", 6)
    once, size = paths(listed(tree)[0]), len(listed(tree)[0])
    for number in range(5):
        (tree / f"a/tab\t{number}.jpg").write_bytes(b"x")
    (tree / "stray.jpg").write_bytes(b"")  # no image beside the folders, which stay classes
    (tree / "c/zero.png").write_bytes(b"")
    (tree / "b/gone.jpg").symlink_to("nothing")
    os.mkfifo(tree / "b/pipe.jpg")
    (tree / "empty class").mkdir()
    (tree / "empty class/zero.jpg").write_bytes(b"")
    for _ in range(2):  # as an `images` run, which lists them before and when it begins
        dataset = load_dataset("folder", tree)
        assert (len(dataset.train_images), dataset.class_names) == (size, ("a", "b", "c"))
    assert paths(listed(tree)[0]) == once
    (record,) = caplog.records
    assert record.getMessage() == (
        f"left out of {tree}: 5 names with a tab or a line break (first 'a/tab\\t0.jpg'), 1 link to a missing file "
        "(b/gone.jpg), 1 name that is no file (b/pipe.jpg), 3 empty files (first c/zero.png)"
    )
    lines: list[str] = []
    pack(tree, tmp_path / "packed", PackOptions(on_broken=lines.append))
    assert lines == [record.getMessage()]
    for path in tree.rglob("0*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no images in .*/tree \(left out of .*: .* empty files"):
        load_dataset("folder", tree)


def test_names_of_any_bytes(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9 \xf0\x9f\x98\x80.jpg")
    (tmp_path / name).write_bytes(b"x")
    listing, _ = listed(tmp_path)
    assert listing.read(0) == b"x"
    (tmp_path / "two\nlines.jpg").write_bytes(b"x")
    for other in ("a\ttab.jpg", "y.jpg"):
        (tmp_path / other).write_bytes(b"x")
    lines = list(listing_lines(ImageSource(tmp_path).entries()))
    assert [line.split(b"\t")[3] for line in lines] == [os.fsencode(name), b"y.jpg"]
    assert left_out_of(tmp_path) == "2 names with a tab or a line break (first 'a\\ttab.jpg')"


def test_broken_files_are_named_once_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = plain_tree(tmp_path / "tree", 6)
    (tree / "b/text.jpg").write_bytes(b"no image")
    (tree / "c/cut.jpg").write_bytes((tree / "c/0002.jpg").read_bytes()[:400])
    (tree / "a/gone.jpg").symlink_to("nothing")
    (tmp_path / "list.txt").write_text("\n".join(sorted(str(path) for path in tree.rglob("*.jpg"))))
    dataset = load_dataset("folder", tmp_path / "list.txt", image_size=28)
    images = dataset.train_images
    assert isinstance(images, DecodedImages)
    gone, kinds = f"{tree}/a/gone.jpg", "a link to nothing, a text and half an image"
    assert images.intact(np.arange(len(images)))[2][0] == f"{gone} (link to a missing file)", kinds
    for again in (images, images.to(torch.device("cpu"))):
        again[:]
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 3, "however often each is read"
    assert f"broken image: {gone} (link to a missing file)" in {line.partition(": the next")[0] for line in named}
    assert sum("the next intact one is shown" in line for line in named) == 1
    assert all(line.count(str(tmp_path)) == 1 for line in named)


def test_listing_rejects_other_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder or list"):
        ImageSource(tmp_path / "absent")
    for content in (b"", b"0\t-1\t-1\tcut off"):
        with pytest.raises(ValueError, match="empty or cut off"):
            Listing(content, tmp_path)


def test_folders_without_images_are_no_classes(tmp_path: Path) -> None:
    tree = plain_tree(tmp_path, 3)
    (tree / "aa/deep").mkdir(parents=True)
    (tree / "aa/deep/notes.txt").write_text("no image")
    listing, found = listed(tree)
    assert found.classes == ["a", "b", "c"]
    assert listing.labels().tolist() == [0, 1, 2]


def test_labels_of_a_list_may_be_names(tmp_path: Path) -> None:
    text = tmp_path / "list.txt"
    text.write_text("a b.jpg grey cat.png dog\n1.jpg\tgrey cat\n2.jpg dog\n")
    listing, found = listed(text)
    assert found.classes == ["dog", "grey cat"]
    assert found.kind == "labels by name"
    assert listing.labels().tolist() == [0, 1, 0]
    assert paths(listing) == ["a b.jpg grey cat.png", "1.jpg", "2.jpg"]
    listing, found = listed(text, classes=["zebra", "dog"])
    assert found.classes == ["zebra", "dog", "grey cat"]
    assert listing.labels().tolist() == [1, 2, 1]
    listing, found = listed(text, labelled=False)
    assert found.classes == []
    assert listing.labels().tolist() == [-1, -1, -1]
