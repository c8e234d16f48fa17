"""Packing: every row is RangesOrder's image, killed packs end alike, extending changes no byte, tars are tars."""

from __future__ import annotations

import errno
import os
import queue
import re
import shutil
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Container
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.conditions import no_condition_in_this_thread
from tests.helpers.dying_pack import Killed, contents, die_at
from tests.helpers.image_tree import BROKEN, encoded, odd_tree, piece, plain_tree
from tests.trainer.data.written import write_tar, write_zip
from trainer.data import packer
from trainer.data.config import SourceOptions
from trainer.data.decoded_images import DecodedImages
from trainer.data.finished_tars import FinishedTars
from trainer.data.listing import Entry, Listing
from trainer.data.manifest import LOCK, Manifest, index_path, shards_path
from trainer.data.pack import PackOptions, pack, verify
from trainer.data.packed import PackedImages
from trainer.data.reading import read_source
from trainer.data.survey import checked_sample, sample
from trainer.display import Counting
from weightserver.common.atomic_files import locked
from weightserver.common.threads import in_other_thread
from weightserver.torch import RangesOrder
from weightserver.torch.windows import RowOrder

TAR_BYTES = 20_000


def options(**changes: Any) -> PackOptions:
    return PackOptions(**{"order_seed": 5, "tar_bytes": TAR_BYTES, "threads": 2} | changes)


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
    return read_source(tree).train.listing


def intact(listing: Listing, image: int) -> int:
    """The image that stands for `image`."""
    while listing[image].path in BROKEN:
        image = (image + 1) % len(listing)
    return image


def test_every_row_is_the_orders_image(packed: Path, listing: Listing) -> None:
    images = PackedImages(packed)
    assert len(images) == len(listing)
    expected = [intact(listing, int(i)) for i in RowOrder(len(listing), 5).images(np.arange(len(listing)))]
    assert list(map(images.read_row, range(len(images)))) == [listing.read(image) for image in expected]
    for image in range(len(listing)):
        assert images.read(image) == listing.read(intact(listing, image))
    replaced = [image for image in range(len(listing)) if intact(listing, image) != image]
    assert images.replaced(np.arange(len(listing))[::-1]).tolist() == replaced
    assert images.replaced(np.array([replaced[1], 0, 1])).tolist() == [replaced[1]]
    assert len(images.replaced(np.arange(0))) == 0
    assert images.labels().tolist() == listing.labels().tolist(), "a broken image keeps its own label"


def test_tars_are_what_tarfile_reads(packed: Path) -> None:
    images, row = PackedImages(packed), 0
    paths = sorted(packed.glob("*.tar"))
    assert len(paths) > 3
    each = images.manifest.ranges[0].rows_per_tar
    assert {shard.count for shard in images.manifest.shards[:-1]} == {each}
    assert TAR_BYTES / 2 < np.mean([path.stat().st_size for path in paths[:-1]]) < TAR_BYTES * 1.5
    assert len(images.manifest.shards) == len(paths)
    for path in paths:
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


def test_packing_gives_the_same_bytes_whatever_the_threads(packed: Path, tree: Path, tmp_path: Path) -> None:
    pack(tree, tmp_path, options(threads=1))
    assert contents(tmp_path) == contents(packed)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("fatal", range(1, 10))  # listing, manifest; of the first two tars: written, moved, noted
def test_an_interrupted_pack_continues_to_the_same_bytes(
    packed: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int, moment: str
) -> None:
    """It is interrupted where a file is renamed into place, and again a few files later."""
    for last in (fatal, 5):
        die_at(last, moment, monkeypatch)
        with pytest.raises(Killed):
            pack(tree, tmp_path, options())
        monkeypatch.undo()
    pack(tree, tmp_path, options())
    assert contents(tmp_path) == contents(packed)


def test_a_pack_is_complete_by_a_whole_list_of_its_tars(packed: Path, tree: Path, tmp_path: Path) -> None:
    """Part of a list is damage, or what earlier versions had of packs that were not finished."""
    directory = shutil.copytree(packed, tmp_path / "packed")
    path = shards_path(directory, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in ([], lines[:-1], [*lines[:-1], lines[-1][:50]], [lines[1], *lines[1:]], [*lines, lines[-1]]):
        path.write_bytes(b"".join(damaged))
        for read in (PackedImages, lambda one: pack(tree, one, options())):
            with pytest.raises(
                ValueError, match=r"shards-0+\.jsonl is damaged, or an earlier version .* began it: remove it, and rep"
            ):
                read(directory)
    path.unlink()
    with pytest.raises(ValueError, match="is not completely packed: repeat the command"):
        PackedImages(directory)
    pack(tree, directory, options())
    assert contents(directory) == contents(packed)


def test_extending_adds_a_range_and_changes_no_old_byte(tmp_path: Path) -> None:
    tree, directory = plain_tree(tmp_path / "tree", 20), tmp_path / "packed"
    pack(tree, directory, options())
    before, old = contents(directory), PackedImages(directory)
    plain_tree(tree, 13, first=20)
    (tree / "0 new class").mkdir()
    (tree / "0 new class/x.jpg").write_bytes((tree / "a/0000.jpg").read_bytes())
    manifest = pack(tree, directory, options(extend=True))
    after, new = contents(directory), PackedImages(directory)
    assert {name for name, digest in before.items() if after[name] != digest} == {"manifest.json"}
    assert manifest.sizes == (20, 14)
    assert manifest.classes == ("a", "b", "c", "0 new class")
    assert [new.read_row(row) for row in range(20)] == [old.read_row(row) for row in range(20)]
    assert np.array_equal(new.labels()[:20], old.labels())
    order = RangesOrder((20, 14), 5)
    everything = sorted(str(path.relative_to(tree)) for path in tree.rglob("*.jpg"))
    fresh = [path for path in everything if path.startswith("0 new") or int(path[2:6]) >= 20]
    for row, image in zip(range(20, 34), order.images(np.arange(20, 34)), strict=True):
        assert new.read_row(row) == (tree / fresh[image - 20]).read_bytes()
    pack(tree, directory, options(extend=True))  # nothing is new any more
    assert contents(directory) == after
    for path in (listed := shards_path(directory, 20), index_path(directory, 20), max(directory.glob("*.tar"))):
        os.truncate(path, path.stat().st_size // 2)  # as earlier versions left them of what was not finished
    with pytest.raises(ValueError, match=rf"^{listed} is damaged, .*: remove it, and repeat"):
        PackedImages(directory)
    listed.unlink()
    assert len(PackedImages(directory)) == 20
    pack(tree, directory, options(extend=True))
    assert contents(directory) == after
    os.truncate(shards_path(directory, 0), 0)
    with pytest.raises(ValueError, match=r"began it: pack the images again, into a new directory$"):
        PackedImages(directory)


def end_after(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a pack when it has this number of rows of its range."""

    def update(_: Counting, done: int, total: int) -> None:
        if done == rows:
            raise Killed

    monkeypatch.setattr(Counting, "update", update)


def test_an_interrupted_extension_can_be_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is complete, only the earlier images can be used."""
    first, second = plain_tree(tmp_path / "first", 10), plain_tree(tmp_path / "second", 30, first=10)
    for name in ("whole", "halved"):
        pack(first, tmp_path / name, options())
    pack(second, tmp_path / "whole", options(extend=True))

    old, planned_for_ten = PackedImages(tmp_path / "halved"), (tmp_path / "halved/manifest.json").read_bytes()
    end_after(25, monkeypatch)
    with pytest.raises(Killed):
        pack(second, tmp_path / "halved", options(extend=True))
    monkeypatch.undo()
    halved = PackedImages(tmp_path / "halved")
    assert "without 30 images that are being added" in caplog.text
    assert [halved.read_row(row) for row in range(10)] == [old.read_row(row) for row in range(len(old))]
    assert np.array_equal(halved.labels(), old.labels())
    with pytest.raises(ValueError, match="finish packing those first"):
        pack(first, tmp_path / "halved", options(extend=True))
    shutil.copytree(tmp_path / "halved", tmp_path / "again")
    (tmp_path / "again/manifest.json").write_bytes(planned_for_ten)
    shards_path(tmp_path / "again", 10).touch()  # as earlier versions left it if they were killed while they planned
    for name in ("halved", "again"):
        pack(second, tmp_path / name, options(extend=True))
        assert contents(tmp_path / name) == contents(tmp_path / "whole")


def test_too_many_broken_images_end_the_pack(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"about 4 of 53 images are broken.*, and 2 may be: .*--max-broken 8") as ended:
        pack(tree, tmp_path / "packed", options(source=SourceOptions(max_broken=2)))
    assert "\n" not in str(ended.value)
    assert not contents(tmp_path / "packed"), "nothing is packed in vain"
    pack(tree, tmp_path / "packed", options(source=SourceOptions(max_broken=4)))
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    (nothing / "a.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"none of 1 sampled images can be read, first .*nothing/a.jpg \(.*: repair"):
        pack(nothing, tmp_path / "other", options())
    assert not contents(tmp_path / "other"), "once they are repaired, they are packed"


def test_few_broken_images_are_allowed_however_many_of_them_a_sample_has(tmp_path: Path) -> None:
    """A percent of 20,000 images may be broken: 3 of the 256 that are read first are more by chance."""
    number = 20_000
    (tmp_path / "intact.png").write_bytes(encoded(piece(0, width=4, height=4), "PNG"))
    (tmp_path / "broken.png").write_bytes(b"<html>")

    def images(broken: Container[int]) -> DecodedImages:
        names = ("broken.png" if image in broken else "intact.png" for image in range(number))
        return DecodedImages(Listing(b"".join(Entry(-1, -1, -1, name, "").line() for name in names), tmp_path), 1)

    first = np.linspace(0, number - 1, 256).astype(int).tolist()
    few = images(first[10:13])
    assert sample(few).num_broken > sample(few).max_broken == 200
    checked_sample(few)
    with pytest.raises(ValueError, match=r"about \d{3} of 20,000 images are broken \(.* of 4,096 that were read"):
        checked_sample(images(range(0, number, 50)))


def test_a_stretch_of_broken_images_is_not_searched_for_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read for its reason, and once at most when another is sought; also by a pack that is continued."""
    tree, packed, reads = plain_tree(tmp_path / "tree", 20), tmp_path / "packed", Counter[int]()
    for number in range(30):
        (tree / f"b/x{number:02d}.jpg").write_bytes(b"no image")
    read = Listing.read

    def counted(listing: Listing, image: int) -> bytes:
        reads[image] += 1
        return read(listing, image)

    monkeypatch.setattr(Listing, "read", counted)
    pack(tree, tmp_path / "whole", options(threads=1))
    assert sum(reads.values()) <= 50 + 50 + 30 + 30, "the sample, and the first intact one for each"

    exactly = options(source=SourceOptions(max_broken=30))
    end_after(25, monkeypatch)
    with pytest.raises(Killed):
        pack(tree, packed, exactly)
    monkeypatch.undo()
    assert 0 < sum(shard.num_broken for shard, _ in FinishedTars(packed, Manifest.load(packed)).finished()) < 30
    with pytest.raises(ValueError, match="more than 29 of 50 images are broken"):
        pack(tree, packed, options(source=SourceOptions(max_broken=29)))
    pack(tree, packed, exactly)
    assert contents(packed) == contents(tmp_path / "whole")


def test_bad_input(tree: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    plain_tree(tmp_path / "other", 3)
    (tmp_path / "used/other.tar").write_text("")
    (tmp_path / "tests/test").mkdir(parents=True)
    (tmp_path / "tests/test/shards-000000000000.jsonl").write_text("")
    for source, output, changes, message in (
        (tmp_path / "empty", tmp_path / "out", {}, "no images in"),
        (tmp_path / "absent", tmp_path / "out", {}, "no such folder or list"),
        (tree, tmp_path / "file", {}, "is not a directory"),
        (tree, tmp_path / "used", {}, "holds other files"),
        (tree, tmp_path / "tests", {}, "holds other files"),
        (tree, tmp_path / "out", {"extend": True}, "no packed images to extend"),
        (tree, packed, {"order_seed": 6}, "in the order of seed 5, not 6"),
        (tmp_path / "other", packed, {}, "give --extend to add these"),
        (tree, tree, {}, "is the source itself: give another directory"),
        (packed, tmp_path / "twice", {}, "holds packed images: give the folder"),
    ):
        before = contents(packed)
        with pytest.raises(ValueError, match=message):
            pack(source, output, options(**changes))
        assert contents(packed) == before


@pytest.mark.parametrize("name", ["00000.tar", "{00000..00001}.tar", "list", "data.zip"])
def test_a_pack_of_a_file_is_not_one_of_its_folder(name: str, tmp_path: Path) -> None:
    """Whose other images would be missing. One of splits, in a folder or in its class folders, is."""
    images, folder, packed = plain_tree(tmp_path / "tree", 6), tmp_path / "data", tmp_path / "packed"
    files = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in images.rglob("*.jpg")}
    for number in range(2):
        write_tar(folder / f"{number:05d}.tar", {f"{number}{file[2:]}": image for file, image in files.items()})
    splits = {f"{split}/{file}": image for split in ("train", "test") for file, image in files.items()}
    write_zip(folder / "data.zip", splits)
    (folder / "list").write_text("".join(f"{images / file}\n" for file in files))
    first = pack(folder / name, packed, options())
    with pytest.raises(ValueError, match=re.escape(f"holds images of {folder / name}") + ".*give --extend to add"):
        pack(folder, packed, options())
    assert pack(folder / name, packed, options()) == first


@pytest.mark.parametrize("pattern", ["train/{}", "{}/train"])
def test_a_pack_of_splits_is_continued_by_the_folder_that_has_them(pattern: str, tmp_path: Path) -> None:
    for letter in "ab":
        for split in ("train", "test"):
            plain_tree(tmp_path / "x", 3)
            shutil.copytree(tmp_path / "x/a", tmp_path / "data" / pattern.replace("train", split).format(letter))
    first = pack(tmp_path / "data", tmp_path / "packed", options())
    assert pack(tmp_path / "data", tmp_path / "packed", options()) == first
    if pattern == "train/{}":
        assert pack(tmp_path / "data/train", tmp_path / "packed", options()) == first


def test_extended_images_have_the_same_kind_of_labels(tmp_path: Path) -> None:
    """Labels of folders, of numbered lists, and no labels: none can be added to a pack of another kind."""
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
            with pytest.raises(ValueError, match=f"has {kind}, .* {other}: add images of the same kind"):
                pack(sources[other], output, options(extend=True))
        assert Manifest.load(output).sizes == ({"labels by name": 6, "no labels": 1, "labels by number": 2}[kind],)


def test_no_interrupt_leaves_a_lock_taken(packed: Path, tree: Path, tmp_path: Path) -> None:
    with no_condition_in_this_thread():
        pack(tree, tmp_path, options())
    assert contents(tmp_path) == contents(packed)


def test_an_interrupt_ends_the_packing_at_once(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that it leaves behind reads no further image, and the command continues when it is repeated."""
    decoding, ended = threading.Event(), queue.SimpleQueue[BaseException | None]()
    output, read = tmp_path / "packed", Listing.read

    def noted(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            ended.put(error)
            raise
        ended.put(None)

    def slow(listing: Listing, image: int) -> bytes:
        decoding.set()
        time.sleep(0.1)
        return read(listing, image)

    def interrupt() -> None:
        if decoding.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr(Listing, "read", slow)
    monkeypatch.setattr(packer, "in_other_thread", lambda call: in_other_thread(partial(noted, call), look=interrupt))
    with pytest.raises(KeyboardInterrupt):
        pack(tree, output, options())
    assert isinstance(ended.get(timeout=60), CancelledError | RuntimeError)
    monkeypatch.undo()
    assert pack(tree, output, options()).complete


def test_a_plan_that_was_given_up_leaves_no_test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk was full after the first of two manifests."""
    both, without = plain_tree(tmp_path / "both/train", 20).parent, plain_tree(tmp_path / "without", 20)
    plain_tree(both / "val", 10)
    save = Manifest.save

    def fails(manifest: Manifest, directory: Path) -> None:
        save(manifest, directory)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Manifest, "save", fails)
    with pytest.raises(OSError, match="full"):
        pack(both, tmp_path / "packed", options())
    monkeypatch.undo()
    pack(without, tmp_path / "packed", options())
    assert not (tmp_path / "packed/test/manifest.json").exists()


def test_two_packers_do_not_mix(tree: Path, tmp_path: Path) -> None:
    with locked(tmp_path / LOCK, shared=True), pytest.raises(OSError, match="is being written by another process"):
        pack(tree, tmp_path, options())


def test_damage_is_found(tree: Path, tmp_path: Path) -> None:
    pack(tree, tmp_path, options())
    assert verify(tmp_path) == []
    tars = sorted(tmp_path.glob("*.tar"))
    content = bytearray(tars[0].read_bytes())
    content[700] ^= 1
    tars[0].write_bytes(content)
    tars[1].unlink()
    index = tmp_path / "index-000000000000.bin"
    records = bytearray(index.read_bytes())
    records[-1] ^= 1
    index.write_bytes(records)
    with pytest.raises(ValueError, match=r"the index of .* is damaged, in the records from row"):
        PackedImages(tmp_path).labels()
    shards = Manifest.load(tmp_path).shards
    tar_lines = [f"{tars[0]} is damaged", f"{tars[1]} is missing"]
    assert verify(tmp_path) == [*tar_lines, f"{index} is damaged in rows {shards[-1].first}..52"]
    os.truncate(tars[2], 600)
    with pytest.raises(OSError, match="is cut off"):
        PackedImages(tmp_path).read_row(shards[2].first + 1)
    os.truncate(index, len(records) - 64)
    assert verify(tmp_path)[-1] == f"{index} is damaged in rows {shards[-1].first}..52"
    listing = tmp_path / "images-000000000000.tsv"
    content = bytearray(listing.read_bytes())
    listing.write_bytes(content.replace(b"a/", b"b/", 1))
    assert verify(tmp_path)[0] == f"{listing} is damaged"
    listing.write_bytes(content)
    for lost in (False, True):
        if lost:
            index.unlink()
            assert verify(tmp_path)[3:] == [f"{index} is missing"]
        with pytest.raises(ValueError, match=f"{index} is not the index of 53 rows: pack the images again"):
            PackedImages(tmp_path)
        with pytest.raises(ValueError, match=f"{index} is not the index of 53 rows: pack .* into a new directory"):
            pack(tree, tmp_path, options())


def test_a_note_that_is_damaged_is_not_used(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die_at(12, "before", monkeypatch)
    with pytest.raises(Killed):
        pack(tree, tmp_path, options())
    monkeypatch.undo()
    note = min((tmp_path / "parts").glob("[!.]*"))
    tar = min(tmp_path.glob("*.tar"))
    for path in (note, tar):
        content = path.read_bytes()
        for damaged in (content[:-1], b"", b"[]" + content):
            path.write_bytes(damaged)
            with pytest.raises(
                ValueError, match=f"^{path} does not match its checksum: remove it, and repeat the command"
            ):
                pack(tree, tmp_path, options())
        path.write_bytes(content)
    note.unlink()
    assert pack(tree, tmp_path, options()).complete
    assert verify(tmp_path) == []


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"format": 5}', '{"format": 4}', '{"format": 1, "ranges": 3, "classes": []}']
)
def test_a_damaged_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is"):
        Manifest.load(tmp_path)
