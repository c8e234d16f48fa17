"""Listing a source: its images, their order and labels."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.image_tree import odd_tree, plain_tree
from trainer.data.listing import ImageSource, Listing, listing_lines


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


def test_cyclic_links_are_followed_once(tmp_path: Path) -> None:
    plain_tree(tmp_path, 3)
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "d").symlink_to(tmp_path / "b")
    listing, found = listed(tmp_path)
    assert found.classes == ["a", "b", "c", "d"]
    assert {"b/0001.jpg", "d/0001.jpg", "a/up/b/0001.jpg"} <= set(paths(listing))


def test_names_of_any_bytes(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9 \xf0\x9f\x98\x80.jpg")
    (tmp_path / name).write_bytes(b"x")
    listing, _ = listed(tmp_path)
    assert listing.read(0) == b"x"
    (tmp_path / "two\nlines.jpg").write_bytes(b"x")
    left_out: list[str] = []
    for other in ("a\ttab.jpg", "y.jpg"):
        (tmp_path / other).write_bytes(b"x")
    lines = list(listing_lines(ImageSource(tmp_path).entries(), left_out.append))
    assert [line.split(b"\t")[3] for line in lines] == [os.fsencode(name), b"y.jpg"]
    assert [line.split(": ")[1].split(" has ")[0] for line in left_out] == ["'a\\ttab.jpg'", "'two\\nlines.jpg'"]


def test_listing_rejects_other_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder or list"):
        ImageSource(tmp_path / "absent")
    for content in (b"", b"0\t-1\t-1\tcut off"):
        with pytest.raises(ValueError, match="empty or cut off"):
            Listing(content, tmp_path)
