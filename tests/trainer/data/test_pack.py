"""Packing: every row is RangesOrder's image, killed packs end alike, extending changes no byte, tars are tars."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.image_tree import BROKEN, odd_tree, plain_tree
from trainer.data import pack as pack_module
from trainer.data.listing import ImageSource, Listing, listing_lines
from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, pack, verify
from trainer.data.packed import PackedImages
from trainer.schedule import RangesOrder, RowOrder

SHARD_BYTES = 20_000
ROOT = Path(__file__).parents[3]


def options(**changes: Any) -> PackOptions:
    return PackOptions(**{"order_seed": 5, "shard_bytes": SHARD_BYTES, "threads": 2} | changes)


def contents(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_tree(tmp_path_factory.mktemp("images") / "tree", 40)


@pytest.fixture(scope="module")
def packed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    pack(tree, directory, options())
    return directory


@pytest.fixture(scope="module")
def listing(tree: Path) -> Listing:
    return Listing(b"".join(listing_lines(ImageSource(tree).entries())), tree)


def intact(listing: Listing, image: int) -> int:
    """The image that stands for `image`."""
    while listing[image].path in BROKEN:
        image = (image + 1) % len(listing)
    return image


def test_every_row_is_the_orders_image(packed: Path, listing: Listing) -> None:
    images = PackedImages(packed)
    assert len(images) == len(listing)
    expected = [intact(listing, int(i)) for i in RowOrder(len(listing), 5).images(np.arange(len(listing)))]
    assert list(images.rows(0, len(images))) == [listing.read(image) for image in expected]
    for image in range(len(listing)):
        assert images.read(image) == listing.read(intact(listing, image))
    assert images.shown().tolist() == [intact(listing, image) for image in range(len(listing))]
    assert images.labels().tolist() == [listing[intact(listing, image)].label for image in range(len(listing))]


def test_broken_images_are_reported_with_their_substitutes(tree: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    manifest = pack(tree, tmp_path, options(on_broken=lines.append))
    substitutes = [one for shard in manifest.shards for one in shard.substitutes]
    assert sorted(one.path for one in substitutes) == [f"{tree}/{name}" for name in BROKEN]
    assert len(lines) == len(BROKEN)
    (line,) = (line for line in lines if "text.jpg" in line)
    assert line == f"broken: {tree}/b/text.jpg (no image of a known format); in its place {tree}/b/turned.jpg"


def test_tars_are_what_tarfile_reads(packed: Path) -> None:
    images, row = PackedImages(packed), 0
    paths = sorted(packed.glob("*.tar"))
    assert len(paths) > 3
    for path in paths:
        assert path.stat().st_size <= SHARD_BYTES or len(np.load(path.with_suffix(".npy"))) == 1
        with tarfile.open(path) as tar:
            members = tar.getmembers()
            for image, label in zip(members[::2], members[1::2], strict=True):
                key = f"{row:012d}"
                assert image.name.startswith(f"{key}.")
                assert label.name == f"{key}.cls"
                file, number = tar.extractfile(image), tar.extractfile(label)
                assert file is not None
                assert number is not None
                assert file.read() == images.read_row(row)
                assert int(number.read()) == images.labels()[images.order.images(np.array([row]))[0]]
                row += 1
    assert row == len(images)


def test_a_window_is_contiguous(packed: Path) -> None:
    for path in packed.glob("*.npy"):
        index = np.load(path)
        assert (index["offset"][1:] > index["offset"][:-1] + index["length"][:-1]).all()


def test_packing_twice_gives_the_same_bytes_whatever_the_threads(packed: Path, tree: Path, tmp_path: Path) -> None:
    pack(tree, tmp_path, options(threads=1))
    assert contents(tmp_path) == contents(packed)
    pack(tree, tmp_path, options())
    assert contents(tmp_path) == contents(packed)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("fatal", range(1, 12))
@pytest.mark.parametrize("behind", [False, True])
def test_a_pack_that_ends_anywhere_goes_on_to_the_same_bytes(
    packed: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int, behind: bool
) -> None:
    """Where a file is put in place, before it or behind it; and once more a few files later."""
    replace, calls, last = Path.replace, 0, 0

    def replace_or_die(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == last and not behind:
            raise Killed
        result = replace(path, target)
        if calls == last:
            raise Killed
        return result

    monkeypatch.setattr(Path, "replace", replace_or_die)
    for last in (fatal, 5):  # noqa: B007 - replace_or_die reads it
        calls = 0
        with pytest.raises(Killed):
            pack(tree, tmp_path, options())
    monkeypatch.undo()
    pack(tree, tmp_path, options())
    assert contents(tmp_path) == contents(packed)


@pytest.mark.slow
def test_kill_minus_nine(packed: Path, tree: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer.data.pack import PackOptions, pack\n"
        "print('ready', flush=True)\n"
        f"pack(Path(sys.argv[1]), Path(sys.argv[2]), PackOptions(order_seed=5, shard_bytes={SHARD_BYTES}, threads=2))"
    )
    command = [sys.executable, "-c", code, str(tree), str(tmp_path / "packed")]
    moments = random.Random(1)
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(moments.uniform(0.01, 0.12))
            process.kill()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    assert contents(tmp_path / "packed") == contents(packed)


def test_extending_adds_a_range_and_changes_no_old_byte(tmp_path: Path) -> None:
    tree, directory = plain_tree(tmp_path / "tree", 20), tmp_path / "packed"
    pack(tree, directory, options())
    before, old = contents(directory), PackedImages(directory)
    plain_tree(tree, 13, first=20)
    (tree / "0 new class").mkdir()
    (tree / "0 new class/x.jpg").write_bytes((tree / "a/0000.jpg").read_bytes())
    manifest = pack(tree, directory, options(extend=True))
    after, new = contents(directory), PackedImages(directory)
    assert {name: after[name] for name in before if name != "manifest.json"} == {
        name: before[name] for name in before if name != "manifest.json"
    }
    assert manifest.sizes == (20, 14)
    assert manifest.classes == ("a", "b", "c", "0 new class")
    assert list(new.rows(0, 20)) == list(old.rows(0, 20))
    assert np.array_equal(new.labels()[:20], old.labels())
    order = RangesOrder((20, 14), 5)
    everything = sorted(str(path.relative_to(tree)) for path in tree.rglob("*.jpg"))
    fresh = [path for path in everything if path.startswith("0 new") or int(path[2:6]) >= 20]
    for row, image in zip(range(20, 34), order.images(np.arange(20, 34)), strict=True):
        assert new.read_row(row) == (tree / fresh[image - 20]).read_bytes()
    pack(tree, directory, options(extend=True))  # nothing is new any more
    assert contents(directory) == after


def test_an_extension_that_was_ended_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And until its end the images of before are all there are."""
    first, second = plain_tree(tmp_path / "first", 10), plain_tree(tmp_path / "second", 30, first=10)
    for name in ("whole", "halved"):
        pack(first, tmp_path / name, options())
    pack(second, tmp_path / "whole", options(extend=True))

    def dying(done: int, count: int) -> None:
        if done == 25:
            raise Killed

    old = PackedImages(tmp_path / "halved")
    with pytest.raises(Killed):
        pack(second, tmp_path / "halved", options(extend=True, on_rows=dying))
    halved = PackedImages(tmp_path / "halved")
    assert "without 30 images that are being added" in caplog.text
    assert list(halved.rows(0, 10)) == list(old.rows(0, len(old)))
    assert np.array_equal(halved.labels(), old.labels())
    with pytest.raises(ValueError, match="go on with those first"):
        pack(first, tmp_path / "halved", options(extend=True))
    pack(second, tmp_path / "halved", options(extend=True))
    assert contents(tmp_path / "halved") == contents(tmp_path / "whole")


def test_a_pack_that_was_ended_is_none_yet(tmp_path: Path) -> None:
    def dying(done: int, count: int) -> None:
        if done == 15:
            raise Killed

    with pytest.raises(Killed):
        pack(plain_tree(tmp_path / "tree", 20), tmp_path / "packed", options(on_rows=dying))
    assert Manifest.load(tmp_path / "packed").shards
    with pytest.raises(ValueError, match="is not packed to its end"):
        PackedImages(tmp_path / "packed")


def test_too_many_broken_images_end_the_pack(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"more than 2 of 53 images are broken.*--max-broken") as caught:
        pack(tree, tmp_path / "packed", options(max_broken=2))
    assert "\n" not in str(caught.value)
    pack(tree, tmp_path / "packed", options(max_broken=4))
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    (nothing / "a.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=r"are broken .the file is empty.: is their disk there"):
        pack(nothing, tmp_path / "other", options())


def test_bad_input(tree: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used/other.tar").write_text("")
    for source, output, changes, message in (
        (tmp_path / "empty", tmp_path / "out", {}, "no images in"),
        (tmp_path / "absent", tmp_path / "out", {}, "no such folder or list"),
        (tree, tmp_path / "file", {}, "is not a directory"),
        (tree, tmp_path / "used", {}, "holds other files"),
        (tree, tmp_path / "out", {"extend": True}, "no packed images to extend"),
        (tree, packed, {"order_seed": 6}, "in the order of seed 5, not 6"),
        (tree, packed, {"shard_bytes": 7}, "has tars of up to 20,000 bytes"),
        (tmp_path / "empty", packed, {}, "give --extend to add these"),
        (tree, tree, {}, "whose folders may be classes: give a directory beside it"),
        (tree, tree / "packed", {}, "whose folders may be classes: give a directory beside it"),
        (tree, packed, {"labelled": False}, "keeps labels: leave --no-labels away"),
    ):
        before = contents(packed)
        with pytest.raises(ValueError, match=message):
            pack(source, output, options(**changes))
        assert contents(packed) == before
    assert not (tree / "packed").exists()


def test_extended_images_have_the_same_kind_of_labels(tmp_path: Path) -> None:
    """Of folders, of lists with numbers, and of images without any: none goes into a pack of another."""
    sources = {
        "labels by name": plain_tree(tmp_path / "named", 6),
        "no labels": plain_tree(tmp_path / "flat/x", 3) / "a",
    }
    (tmp_path / "list").write_text("named/a/0000.jpg 98\nnamed/b/0001.jpg 99\n")
    sources["labels by number"] = tmp_path / "list"
    for kind, source in sources.items():
        output = tmp_path / f"packed {kind}"
        pack(source, output, options())
        pack(source, output, options(extend=True))
        for other in sources.keys() - {kind}:
            with pytest.raises(
                ValueError, match=f"has {other}, .* {kind}: add images|keeps no labels: give --no-labels"
            ):
                pack(sources[other], output, options(extend=True))
        assert Manifest.load(output).sizes == ({"labels by name": 6, "no labels": 1, "labels by number": 2}[kind],)
    named, unlabelled = sources["labels by name"], tmp_path / "unlabelled"
    pack(named, unlabelled, options(labelled=False))
    with pytest.raises(ValueError, match="keeps no labels: give --no-labels"):
        pack(named, unlabelled, options())
    pack(named, unlabelled, options(labelled=False))
    manifest = pack(tmp_path / "list", tmp_path / "packed no labels", options(labelled=False, extend=True))
    assert (manifest.sizes, manifest.labelled) == ((1, 2), False)


def test_a_list_that_is_refused_leaves_no_pack(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"a.jpg 1\nb.jpg {2**64}\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="line 2"):
            pack(tmp_path / "list.txt", tmp_path / "out", options())
        assert list((tmp_path / "out").iterdir()) == []


def test_two_packers_do_not_mix(tree: Path, tmp_path: Path) -> None:
    with pack_module._only_packer(tmp_path), pytest.raises(OSError, match="another process is packing into"):
        pack(tree, tmp_path, options())


def test_damage_is_found(tree: Path, tmp_path: Path) -> None:
    pack(tree, tmp_path, options())
    assert verify(tmp_path) == []
    tars = sorted(tmp_path.glob("*.tar"))
    content = bytearray(tars[0].read_bytes())
    content[700] ^= 1
    tars[0].write_bytes(content)
    tars[1].unlink()
    assert verify(tmp_path) == [f"{tars[0]} is damaged", f"{tars[1]} is missing"]
    os.truncate(tars[2], 600)
    row = Manifest.load(tmp_path).shards[2].first + 1
    with pytest.raises(OSError, match="is cut off"):
        PackedImages(tmp_path).read_row(row)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 2}', '{"format": 1, "ranges": 3, "classes": []}'])
def test_a_damaged_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is"):
        Manifest.load(tmp_path)
