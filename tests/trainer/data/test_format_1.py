"""Packs of the earlier version are read, verified, extended and finished; golden/pack_1 is one of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.dying_pack import Killed, contents, die_at
from tests.helpers.format_1 import in_format_1
from trainer.data import load_dataset
from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, pack, verify
from trainer.data.packed import PackedImages

GOLDEN = Path(__file__).parents[2] / "golden/pack_1"
OPTIONS = PackOptions(order_seed=5, shard_bytes=10_240, threads=1)
EXTEND = PackOptions(extend=True, threads=1)


def pictures(tree: Path, numbers: range) -> Path:
    """The sources of golden/pack_1: images of four pixels, number 3 is broken."""
    for number in numbers:
        folder = tree / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        content = b"P6 2 2 255\n" + bytes(range(number, number + 12))
        (folder / f"{number}.ppm").write_bytes(content[:-3] if number == 3 else content)
    return tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return pictures(tmp_path / "images", range(7))


@pytest.fixture
def old(tree: Path, tmp_path: Path) -> Path:
    """The golden pack of `tree`."""
    directory = shutil.copytree(GOLDEN, tmp_path / "old")
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace("/images", str(tree)))
    return directory


@pytest.fixture
def new(tree: Path, tmp_path: Path) -> Path:
    pack(tree, tmp_path / "new", OPTIONS)
    return tmp_path / "new"


def without_old_indexes(files: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in files.items() if not (name.startswith("rows-") and name.endswith(".npy"))}


def half(directory: Path) -> Path:
    """A pack that ended after the first tar."""
    manifest = json.loads((directory / "manifest.json").read_text())
    for shard in manifest["ranges"][0]["shards"][1:]:
        for path in directory.glob(f"rows-{shard['first']:012d}.*"):
            path.unlink()
    del manifest["ranges"][0]["shards"][1:]
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return directory


def test_the_tests_write_the_format_of_the_earlier_version(old: Path, new: Path) -> None:
    assert contents(in_format_1(new)) == contents(old)


def test_it_is_read_and_not_changed(old: Path, new: Path, tree: Path) -> None:
    before = contents(old)
    was, now = PackedImages(old), PackedImages(new)
    assert list(was.rows(0, 7)) == list(now.rows(0, 7))
    assert [was.read(image) for image in range(7)] == [now.read(image) for image in range(7)]
    assert np.array_equal(was.labels(), now.labels())
    assert was.shown().tolist() == now.shown().tolist() == [0, 1, 2, 3, 4, 6, 6]
    digests = [load_dataset("packed", directory).digests for directory in (old, new)]
    assert digests[0] == digests[1], "earlier runs identify their images by them"
    assert verify(old) == []
    pack(tree, old, OPTIONS)  # it is packed to its end
    pack(tree, old, EXTEND)  # and nothing is new
    assert contents(old) == before
    index, tar = old / "rows-000000000000.npy", old / "rows-000000000004.tar"
    index.write_bytes(index.read_bytes()[:-1])
    tar.unlink()
    assert verify(old) == [f"{index} is damaged", f"{tar} is missing"]
    with pytest.raises(ValueError, match=f"{index} is not the index of 4 rows"):
        PackedImages(old)


def test_an_unfinished_pack_of_the_earlier_version_is_finished(old: Path, new: Path, tree: Path) -> None:
    with pytest.raises(ValueError, match="is not completely packed: repeat the command"):
        PackedImages(half(old))
    pack(tree, old, OPTIONS)
    assert without_old_indexes(contents(old)) == contents(new)


@pytest.mark.parametrize("finished", [True, False])
def test_added_images_are_as_in_a_new_pack(old: Path, new: Path, tree: Path, finished: bool) -> None:
    """No old tar changes, and open readers continue."""
    before = contents(old)
    reading = PackedImages(old)
    if not finished:
        half(old)
        pack(tree, old, OPTIONS)
    pictures(tree, range(7, 12))
    for directory in (old, new):
        assert pack(tree, directory, EXTEND).sizes == (7, 5)
    after = contents(old)
    assert without_old_indexes(after) == contents(new)
    if finished:
        assert {name: after[name] for name in before if name != "manifest.json"} == {
            name: before[name] for name in before if name != "manifest.json"
        }
        assert list(reading.rows(0, 7)) == list(PackedImages(old).rows(0, 7))
        assert np.array_equal(reading.labels(), PackedImages(old).labels()[:7])
    assert verify(old) == []
    assert json.loads((old / "manifest.json").read_text())["format"] == 2, "the version before refuses others than 1"


@pytest.mark.parametrize("fatal", range(1, 12))
def test_a_pack_that_ends_during_its_conversion(
    old: Path, new: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    reading = PackedImages(old)
    rows = list(reading.rows(0, 7))
    pictures(tree, range(7, 12))
    die_at(fatal, "half", monkeypatch)
    with pytest.raises(Killed):
        pack(tree, old, EXTEND)
    monkeypatch.undo()
    assert list(PackedImages(old).rows(0, 7)) == rows
    for directory in (old, new):
        pack(tree, directory, EXTEND)
    assert without_old_indexes(contents(old)) == contents(new)


def test_a_damaged_index_is_not_taken_over(old: Path, tree: Path) -> None:
    index = old / "rows-000000000004.npy"
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    pictures(tree, range(7, 12))
    with pytest.raises(ValueError, match=f"{index} is missing or damaged: pack the images again"):
        pack(tree, old, EXTEND)
    assert Manifest.load(old).indexed_by_tar
