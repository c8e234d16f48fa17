"""Listing a source: its images, their order and labels."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.image_tree import encoded, odd_tree, piece, plain_tree
from tests.helpers.watching import once_within, wait_until
from tests.trainer.data.written import add_to, write_table, write_tar, write_zip
from trainer.data import Dataset, tables
from trainer.data import listing as listing_module
from trainer.data.config import SourceOptions
from trainer.data.datasets import load_dataset
from trainer.data.decoded_images import DecodedImages
from trainer.data.inspection import inspect_source
from trainer.data.left_out import LeftOut, Reason
from trainer.data.listing import NO_LABEL, Entry, Listing
from trainer.data.manifest import Manifest, Range, Shard, listing_path
from trainer.data.pack import PackOptions, pack
from trainer.data.pack_plan import planned
from trainer.data.packed import PackedImages
from trainer.data.reading import Split, read_source
from trainer.data.survey import survey
from trainer.data.tree import Folder


def listed(source: Path, **options: Any) -> tuple[Listing, Split]:
    """The training images of a source, all of whose files are accounted for."""
    reading = read_source(source, SourceOptions(**options))
    if source.is_dir() and not any(source.rglob("*.tar")) and not any(path.is_symlink() for path in source.rglob("*")):
        files = sum(not path.is_dir() for path in source.rglob("*"))
        used = sum(len(split.listing) for split in reading.splits)
        assert used + sum(reading.left_out.counts.values()) == files, reading.lines()
    return reading.train.listing, reading.train


def paths(listing: Listing) -> list[str]:
    return [entry.path for entry in listing]


def jpeg(number: int) -> bytes:
    return encoded(piece(number))


def peak_memory(work: Callable[[], object]) -> int:
    """Most bytes of Python objects that work takes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def datasets(source: Path, output: Path) -> list[Dataset]:
    """The data set of a source, and that of its pack."""
    pack(source, output, PackOptions())
    return [load_dataset("folder", source, image_size=8), load_dataset("packed", output, image_size=8)]


def write_shard(path: Path, labels: Sequence[str]) -> Path:
    """A tar of samples, an image and its label each."""
    members: dict[str, bytes] = {}
    for number, label in enumerate(labels):
        members |= {f"{number:04d}.jpg": jpeg(number), f"{number:04d}.cls": label.encode()}
    return write_tar(path, members)


def test_a_few_images_beside_class_folders_lose_no_label(tmp_path: Path) -> None:
    plain_tree(tmp_path, 12)
    for name in ("a.png", "at the root.JPEG"):
        (tmp_path / name).write_bytes(b"x")
    for stray in (None, "ignore"):
        listing, found = listed(tmp_path, stray=stray)
        assert (len(listing), found.classes) == (12, ("a", "b", "c"))
    listing, found = listed(tmp_path, stray="use")
    assert (found.counts[-1], found.classes) == (2, ("a", "b", "c"))
    assert paths(listing)[4:6] == ["a.png", "at the root.JPEG"], "among the folders, by name"
    assert left_out_of(tmp_path) == "2 images beside the folders (--stray use keeps them) (first a.png)"
    for number in range(5):
        (tmp_path / f"{number}.jpg").write_bytes(b"x")
    reading = read_source(tmp_path)
    assert (len(reading.train.listing), reading.train.labelled) == (19, False), "more than a class has"
    assert any("read as images without labels: --stray ignore" in line for line in reading.lines())


def test_splits_are_chosen(tmp_path: Path) -> None:
    for name in ("Test", "training", "val"):
        plain_tree(tmp_path / "set" / name, 6)
    assert [split.source for split in read_source(tmp_path / "set").splits] == [
        f"{tmp_path}/set/{name}" for name in ("training", "Test", "val")
    ]
    chosen = read_source(tmp_path / "set", SourceOptions(split="val:Test"))
    assert [split.name for split in chosen.splits] == ["val", "Test"]
    with pytest.raises(ValueError, match="--split dev: there is no folder dev with images, but Test, training, val"):
        read_source(tmp_path / "set", SourceOptions(split="dev"))


def test_labels_that_may_be_any_numbers_are_evaluated_as_0_1(tmp_path: Path) -> None:
    """In both splits the same; without images that have none, and those of other classes."""
    largest = 10**15
    write_shard(tmp_path / "train-0000.tar", [str(largest), "5", "-1", "70"])
    write_shard(tmp_path / "test-0000.tar", ["70", str(largest), "6"])
    dataset = load_dataset("folder", tmp_path, image_size=8)
    assert dataset.train_labels.tolist() == [largest, 5, -1, 70], "reports and classes of a run have the numbers"
    evaluated = dataset.evaluated
    assert (evaluated.train_labels.tolist(), evaluated.test_labels.tolist()) == ([2, 0, 1], [1, 2])
    assert (len(evaluated.train_images), len(evaluated.test_images)) == (3, 2)


def test_a_test_split_may_lack_a_class_and_keeps_the_numbers(tmp_path: Path) -> None:
    plain_tree(tmp_path / "set/train", 6)
    plain_tree(tmp_path / "set/test", 6)
    shutil.rmtree(tmp_path / "set/test/a")
    for dataset in datasets(tmp_path / "set", tmp_path / "packed"):
        assert dataset.test_labels.tolist() == [1, 1, 2, 2]
    tests = PackedImages(tmp_path / "packed/test")
    assert tests.manifest.classes == ("a", "b", "c")
    assert tests.labels().tolist() == [1, 1, 2, 2], "as in the training tars"


@pytest.mark.parametrize(("texts", "numbers"), [("1 2 1", [0, 1, 0]), ("cat 2 2", [2, 1, 1])])
def test_labels_of_tests_are_names_where_those_of_training_are(texts: str, numbers: list[int], tmp_path: Path) -> None:
    for split, labels in (("train", "1 2 cat"), ("test", texts)):
        write_shard(tmp_path / f"{split}-000.tar", labels.split())
    assert load_dataset("folder", tmp_path).test_labels.tolist() == numbers


@pytest.mark.parametrize(("name", "classes"), [("class%03d", 3), ("class_%04d", 0), ("%d", 3), ("%05d", 0)])
def test_tars_are_shards_if_they_are_numbered_in_four_digits(name: str, classes: int, tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / f"{name % number}.tar", {"0.jpg": jpeg(number), "1.jpg": jpeg(number)})
    reading = read_source(tmp_path)
    assert len(reading.train.classes) == classes
    assert f" --tars {'shards' if classes else 'classes'} takes " in " ".join(reading.notes), "what decides otherwise"


def test_shards_of_samples_are_no_classes(tmp_path: Path) -> None:
    for shard in range(3):
        members: dict[str, bytes] = {}
        for key in range(4 * shard, 4 * shard + 4):
            members |= {
                f"{key:06d}.jpg": jpeg(key),
                f"{key:06d}.cls": b"%d\n" % (key % 2),
                f"{key:06d}.json": b'{"kind": "k%d"}' % key,
            }
        write_tar(tmp_path / f"train-{shard:06d}.tar", members)
    listing, found = listed(tmp_path)
    assert (listing.labels().tolist(), found.classes) == ([0, 1] * 6, ())
    assert [listing.read(image) for image in range(12)] == [jpeg(image) for image in range(12)]
    assert read_source(tmp_path).left_out.counts == {Reason.LABEL: 12, Reason.SIDECAR: 12}
    assert sorted(listed(tmp_path, label_key="kind")[1].classes) == sorted(f"k{key}" for key in range(12))
    assert len(listed(tmp_path, tars="classes")[1].classes) == 3
    assert listed(tmp_path / "train-{000001..000002}.tar")[0].labels().tolist() == [0, 1] * 4
    with pytest.raises(ValueError, match=r"--tars classes: .*2}.tar is read as shards of samples: give the folder"):
        listed(tmp_path / "train-{000001..000002}.tar", tars="classes")
    with pytest.raises(ValueError, match=r"1 of its 3 files are missing, first .*train-000003.tar"):
        listed(tmp_path / "train-{000001..000003}.tar")


@pytest.mark.parametrize(
    ("beside", "key", "said"),
    [
        ({"json": b'{"meta": {"label": 1}}'}, None, "in .cls; beside the images are .json: --label-key takes labels"),
        ({"target.cls": b"1", "index": b"2"}, None, "in .cls; beside the images are .index, .target.cls: --label-key"),
        ({"json": b'{"meta": {"label": 1}}'}, "meta.label", "by --label-key meta.label; beside the images are .json:"),
        ({"cls": b"1"}, "nosuch", "by --label-key nosuch; beside the images are .cls: "),
        ({}, "nosuch", "by --label-key nosuch; beside the images are no files: "),
        ({}, None, None),
        ({"target.cls": b"1", "index": b"2"}, "index", None),
    ],
)
def test_samples_without_a_label_say_which_files_may_have_it(
    beside: dict[str, bytes], key: str | None, said: str | None, tmp_path: Path
) -> None:
    for shard in range(2):
        members = {"0.jpg": jpeg(0)} | {f"0.{suffix}": content for suffix, content in beside.items()}
        write_tar(tmp_path / f"{shard:05d}.tar", members)
    reading = read_source(tmp_path, SourceOptions(label_key=key))
    notes = [note for note in reading.notes if "no sample has a label" in note]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


def test_options_without_an_effect_are_named(tmp_path: Path) -> None:
    plain_tree(tmp_path / "set", 6)
    write_shard(tmp_path / "shards/0000.tar", ["1", "2"])
    (tmp_path / "list.txt").write_text("set/a/0000.jpg 1\n")
    (tmp_path / "list.csv").write_text("path,kind\nset/a/0000.jpg,x\n")
    given = {"label_key": "json", "tars": "shards", "image_column": "path", "label_column": "kind"}
    uses = {
        "set": [],
        "shards": ["label_key", "tars"],
        "shards/0000.tar": ["label_key", "tars"],
        "shards/{0000..0000}.tar": ["label_key", "tars"],
        "list.txt": [],
        "list.csv": ["image_column", "label_column"],
    }
    for source, used in uses.items():
        named = given if source != "list.txt" else {**given, "image_column": None}  # which makes it a CSV
        reading = read_source(tmp_path / source, SourceOptions(**named))
        notes = [note.partition(" ")[0] for note in reading.notes if "has no effect: there are no" in note]
        unused = [name for name, value in named.items() if value and name not in used]
        assert notes == [f"--{name.replace('_', '-')}" for name in unused], source


def test_a_listing_takes_little_more_memory_than_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per image: listing a source its line, finding those that are not packed yet a hash of 16 bytes."""
    samples = {f"{number:03d}{suffix}": b"17" for number in range(100) for suffix in (".jpg", ".cls")}
    for directory, num_shards in (("few", 4), ("many", 12)):
        for shard in range(num_shards):
            write_tar(tmp_path / directory / f"a shard with a long name {shard:05d}.tar", samples)
    line = len(Entry(17, 1024, 2, "a shard with a long name 00000.tar", "000.jpg").line())
    few, many = (peak_memory(partial(read_source, tmp_path / name)) for name in ("few", "many"))
    assert (many - few) / (8 * 100) < 1.5 * line, (many - few) / 800

    monkeypatch.setattr(listing_module, "_SCANNED_BYTES", 1 << 12)  # whatever the size of a listing
    peaks = list[int]()
    for number in (1_000, 4_000):
        (output := tmp_path / f"{number}").mkdir()
        lines = b"".join(Entry(-1, -1, -1, f"folder/{image:06d}.jpg", "").line() for image in range(number))
        listing_path(output, 0).write_bytes(lines)
        tar = Shard(first=0, count=number, bytes=0, sha256="", index_sha256="", num_broken=0)
        range_ = Range(
            first=0, count=number, source="/a", root="/a", listing_sha256="", rows_per_tar=number, shards=(tar,)
        )
        manifest = Manifest(order_seed=0, labelled=False, classes=(), ranges=(range_,))
        manifest.save(output)
        listing, counts = Listing(lines, Path("/a")), Counter({NO_LABEL: number})
        split = Split(name="", source="/a", listing=listing, classes=(), counts=counts)
        peaks.append(peak_memory(partial(planned, split, manifest, output, output, PackOptions())))
    assert (peaks[1] - peaks[0]) / 3_000 < 2 * 16, peaks


def test_a_flat_folder_and_a_large_tar_take_little_memory_for_each_file(tmp_path: Path) -> None:
    number = 3_000
    names = [f"class/{image:06d}.jpg" for image in range(number)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    tar = write_tar(tmp_path / "one.tar", dict.fromkeys(names, b"x"))
    assert peak_memory(partial(read_source, tmp_path / "class")) / number < 500
    end = 1 << 20  # of the tar, which is read at once
    assert (peak_memory(partial(read_source, tar)) - end) / number < 500


def test_members_of_tars_obey_the_rules_of_folders(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"1.jpg": jpeg(1), "._1.jpg": b"x", "notes.txt": b"x", "bare": jpeg(2), "0.jpg": b""})
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        for kind, name, target in (
            (tarfile.LNKTYPE, "hard.jpg", "1.jpg"),
            (tarfile.SYMTYPE, "soft.jpg", "1.jpg"),
            (tarfile.SYMTYPE, "gone.jpg", "nothing"),
        ):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, target
            tar.addfile(link)
        add_to(tar, "1.jpg", jpeg(3))
    write_tar(tmp_path / "b.tar", {"1.jpg": jpeg(4)})
    listing, found = listed(tmp_path)
    assert [entry.member for entry in listing] == ["1.jpg", "bare", "hard.jpg", "1.jpg"]
    assert [listing.read(image) for image in range(4)] == [jpeg(3), jpeg(2), jpeg(1), jpeg(4)]
    assert listing.path(3) == f"{tmp_path}/b.tar:1.jpg"
    assert found.classes == ("a", "b")
    assert read_source(tmp_path).left_out.counts == dict.fromkeys(
        (Reason.HIDDEN, Reason.NO_IMAGE, Reason.EMPTY, Reason.LINKED, Reason.MISSING, Reason.REPEATED), 1
    )


@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_a_single_archive_is_like_its_folder(suffix: str, tmp_path: Path) -> None:
    tree = odd_tree(tmp_path / "tree", 9)
    archive = Path(shutil.make_archive(str(tmp_path / "made"), suffix, tree)).rename(tmp_path / "archive")
    (plain, a), (packed, b) = listed(tree), listed(archive)
    assert a.classes == b.classes
    assert [packed.read(i) for i in range(len(packed))] == [plain.read(i) for i in range(len(plain))]
    assert packed.labels().tolist() == plain.labels().tolist()
    pack(archive, tmp_path / "packed", PackOptions())
    assert pack(archive, tmp_path / "packed", PackOptions(extend=True)).sizes == (len(plain),), "nothing is new"


def test_the_folders_of_an_archive_may_be_many() -> None:
    """As the identities of faces in one tar are: each is found at once, however many there are."""

    def seconds(_: int) -> float:
        top, began = Folder("", LeftOut()), time.monotonic()
        for number in range(20_000):
            top.folder(str(number)).add("faces.tar", f"{number}/0.jpg", offset=512, length=1)
        assert (top.count(), len(top.folders())) == (20_000, 20_000)
        return time.monotonic() - began

    once_within(2, seconds)


def test_a_tar_that_is_compressed_or_damaged_is_named(tmp_path: Path) -> None:
    tree = plain_tree(tmp_path / "tree", 3)
    archive = shutil.make_archive(str(tmp_path / "archive"), "gztar", tree)
    shutil.copy(archive, tmp_path / "named.tar")
    for path in (Path(archive), tmp_path / "named.tar"):
        with pytest.raises(ValueError, match=r"is a compressed archive.*: unpack it"):
            read_source(path)
    shutil.copy(archive, tree / "download.tar.gz")
    assert read_source(tree).left_out.counts == {Reason.COMPRESSED: 1}
    (tree / "n01440764.tar").write_bytes(b"half a tar" * 200)
    with pytest.raises(ValueError, match=r"n01440764.tar is not a complete tar"):
        read_source(tree)


def test_an_archive_with_impossible_sizes_is_named(tmp_path: Path) -> None:
    """Some of them lead Python back to members before, or make it raise other errors than those of archives."""
    whole = write_tar(tmp_path / "a.tar", {f"{number}.jpg": b"x" * 100 for number in range(3)}).read_bytes()
    back, beyond = b"\xff" * 10 + struct.pack(">H", 2**16 - 1536), b"\x80" + b"\xff" * 11
    for place, size, kind in ((2048, back, b"0"), (1024, beyond, b"0"), (1024, beyond, b"L"), (0, beyond, b"x")):
        header = bytearray(whole[place : place + tarfile.BLOCKSIZE])
        header[124:136], header[156:157], header[148:156] = size, kind, b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        (tmp_path / "a.tar").write_bytes(whole[:place] + header + whole[place + tarfile.BLOCKSIZE :])
        with pytest.raises(ValueError, match=r"a.tar is not a complete tar"):
            read_source(tmp_path / "a.tar")
    zipped = write_zip(tmp_path / "a.zip", {"é.jpg": jpeg(0)}).read_bytes()
    start = zipped.rindex(b"PK\1\2")
    for damaged in (zipped[: start + 6] + b"\xff" + zipped[start + 7 :], zipped.replace("é".encode(), b"\xff\xff")):
        (tmp_path / "a.zip").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a.zip is not a complete zip file"):
            read_source(tmp_path / "a.zip")


def test_a_tar_that_goes_on_after_its_last_header_is_named(tmp_path: Path) -> None:
    """`tarfile` takes a damaged header for the end: the images after it would be missing without a word."""
    whole = write_tar(tmp_path / "whole.tar", {f"{number}.jpg": jpeg(number) for number in range(40)}).read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as tar:
        middle, next_ = (tar.getmembers()[number].offset for number in (20, 39))
        end = tar.offset
    damaged = {
        "a bit": whole[: middle + 150] + b"x" + whole[middle + 151 :],
        "a hole": whole[:middle] + bytes(next_ - middle) + whole[next_:],
        "in a header": whole[: middle + 100],
        "two tars": whole * 2,
    }
    for content in damaged.values():
        (tmp_path / "damaged.tar").write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged.tar is not a complete tar \(damaged at byte"):
            read_source(tmp_path / "damaged.tar")
    rest_of_record = b"x" * (-(end + tarfile.BLOCKSIZE) % tarfile.RECORDSIZE)
    (tmp_path / "whole.tar").write_bytes(whole[:end] + bytes(tarfile.BLOCKSIZE) + rest_of_record)
    assert len(read_source(tmp_path / "whole.tar").train.listing) == 40


def test_images_are_known_by_their_content(tmp_path: Path) -> None:
    plain_tree(tmp_path, 3)
    by_content = {"a/x.jfif": "JPEG", "a/x.avif": "AVIF", "a/1f3a9c": "PNG", "a/x.dat": "WEBP"}
    others = {"c/x.tga": "TGA", "c/x.pcx": "PCX", "c/x.sgi": "SGI", "c/x.icns": "ICNS", "c/x.icon": "ICO"}
    for number, (name, kind) in enumerate((by_content | others).items()):
        (tmp_path / name).write_bytes(encoded(piece(number), kind))
    for number in range(5):
        (tmp_path / f"b/{number}.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(200))
    listing, _ = listed(tmp_path)
    assert paths(listing)[:5] == ["a/0000.jpg", "a/1f3a9c", "a/x.avif", "a/x.dat", "a/x.jfif"]
    assert left_out_of(tmp_path) == "5 HEIC pictures (the extra heic reads them) (first b/0.HEIC)"
    pack(tmp_path, tmp_path / "packed", PackOptions())
    assert len(PackedImages(tmp_path / "packed")) == 12
    (tmp_path / "c/noise.dat").write_bytes(encoded(piece(0), "TGA"))
    counts = read_source(tmp_path).left_out.counts
    assert counts[Reason.NO_IMAGE] == 1, "TGA has no mark: it is known by its suffix only"


def test_an_image_may_have_any_suffix(tmp_path: Path) -> None:
    """Texts stay texts, also those that begin as an image does."""
    commented = b"\xff\xd8\xff\xfe\x01\x22" + b"x" * 288 + jpeg(1)[2:]
    images = {"a/c.txt": commented, "b/d.JSON": encoded(piece(2), "PNG")}
    images |= {name: encoded(piece(3), "GIF") for name in ("b/e.gz", "b/g.csv")}
    texts = {
        "a/labels.csv": b"a.jpg,cat\n",
        "a/notes.txt": b"GIF89a is the first of the formats with an animation" * 9,
        "a/utf8.md": "P1 10 20 été 30 40 hiver\n".encode() * 9,
        "b/latin1.log": "qoif \xe9tait le premier\n".encode("latin-1") * 9,
        "b/boxes.txt": b"P5 2 2 255 20 1\n" * 9,
        "b/f.gz": b"\x1f\x8b" + bytes(50),
    }
    tree = tmp_path / "tree"
    plain_tree(tree, 2)
    for name, content in (images | texts).items():
        (tree / name).write_bytes(content)
    plain = ["a/0000.jpg", "b/0001.jpg"]
    files = {name: (tree / name).read_bytes() for name in [*plain, *images, *texts]}
    write_tar(tmp_path / "one.tar", files)
    write_zip(tmp_path / "one.zip", files)
    for source, first in (("tree", "a/c.txt"), ("one.tar", "one.tar:a/c.txt"), ("one.zip", "one.zip:a/c.txt")):
        listing, found = listed(tmp_path / source)
        assert [entry.member or entry.path for entry in listing] == sorted([*plain, *images])
        assert (found.classes, listing.labels().tolist()) == (("a", "b"), [0, 0, 1, 1, 1, 1])
        reading = read_source(tmp_path / source)
        assert reading.left_out.counts == {Reason.NO_IMAGE: 5, Reason.COMPRESSED: 1}
        assert f"used by content: 4 files, for example {first}" in reading.lines()
    (tree / "c.txt").write_bytes(jpeg(4))
    assert "used by content: 4 files, for example a/c.txt" in read_source(tree).lines(), "a stray is not used"


@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_of_a_large_member_that_is_no_image_the_start_is_read(suffix: str, tmp_path: Path) -> None:
    """An archive may hold archives that do not fit into memory."""
    files = {"a/0.jpg": jpeg(0), "b/1.jpg": jpeg(1), "b/inner.tar.gz": b"\x1f\x8b" + bytes(1 << 24), "b/1": b"P"}
    source = (write_tar if suffix == "tar" else write_zip)(tmp_path / f"one.{suffix}", files)
    assert read_source(source).left_out.counts == {Reason.COMPRESSED: 1, Reason.NO_IMAGE: 1}
    assert peak_memory(lambda: read_source(source)) < 1 << 23


def test_a_text_beside_its_image_belongs_to_it(tmp_path: Path) -> None:
    """It is not opened, as there may be millions: pictures in its place show it."""
    names = ["x/a.jpg", "x/a.txt", "x/a.json", "y/b.PNG", "y/b.XML", "y/a.txt"]
    for name in names:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(jpeg(1))
    write_tar(tmp_path / "one.tar", dict.fromkeys(names, jpeg(1)))
    for source in ("tree", "one.tar"):
        listing, _ = listed(tmp_path / source)
        assert [entry.member or entry.path for entry in listing] == ["x/a.jpg", "y/a.txt", "y/b.PNG"]
        assert read_source(tmp_path / source).left_out.counts == {Reason.NO_IMAGE: 3}


def test_samples_without_an_image_by_suffix_have_one_by_content(tmp_path: Path) -> None:
    samples = {"0.jpg": jpeg(0), "0.txt": jpeg(9), "0.cls": b"1", "1.dat": jpeg(1), "1.txt": b"a cat", "1.cls": b"2"}
    write_tar(tmp_path / "train-000000.tar", samples | {"2.txt": b"none", "3.cls": b"9"})
    listing, found = listed(tmp_path)
    assert [entry.member for entry in listing] == ["0.jpg", "1.dat"]
    assert found.counts == {1: 1, 2: 1}
    reading = read_source(tmp_path)
    assert reading.left_out.counts == {Reason.LABEL: 2, Reason.SIDECAR: 2, Reason.NO_IMAGE: 2}
    assert "used by content: 1 file, for example train-000000.tar:1.dat" in reading.lines()
    said = "2 labels of samples, which are read (first train-000000.tar:0.cls), "
    assert said in left_out_of(tmp_path)


def test_heic_pictures_are_read_with_their_extra(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed: the extra heic")
    for name in ("a/1.HEIC", "b/2", "b/3.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        heif.from_pillow(piece(1)).save(tmp_path / name, format="HEIF", quality=95)
    listing, found = listed(tmp_path)
    assert (paths(listing), found.classes) == (["a/1.HEIC", "b/2", "b/3.jpg"], ("a", "b"))
    images = load_dataset("folder", tmp_path, image_size=42).train_images[:].float()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/1.png").write_bytes(encoded(piece(1), "PNG"))
    expected = load_dataset("folder", tmp_path / "plain", image_size=42).train_images[:].float()
    assert (images - expected).abs().mean() < 10, "compressed, with half of the colours' resolution"
    pack(tmp_path / "b", tmp_path / "packed", PackOptions())
    with tarfile.open(next((tmp_path / "packed").glob("*.tar"))) as tar:
        assert {name.partition(".")[2] for name in tar.getnames()} == {"heic"}


def test_hidden_files_runs_and_packs_are_no_source(tmp_path: Path) -> None:
    """Nor is what links into them; each file of them counts."""
    plain_tree(tmp_path, 6)
    before = paths(listed(tmp_path)[0])
    for name in (".cache/x/1.jpg", ".cache/2.jpg", "lost+found/1.jpg", "run/training.png", "run/checkpoints/rows"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(1))
    (tmp_path / "run/config.json").write_text('{"format": 3}')
    (tmp_path / "a/.empty").mkdir()
    listed(tmp_path)  # compares the sum with the number of files
    pack(tmp_path, tmp_path / "run/packed", PackOptions())
    (tmp_path / "a/linked.png").symlink_to(tmp_path / "run/training.png")
    assert paths(read_source(tmp_path).train.listing) == before
    num_files = sum(path.is_file() for path in (tmp_path / "run").rglob("*"))
    left_out = {Reason.HIDDEN: 3, Reason.LINKED: 1, Reason.OUTPUT: num_files}
    assert read_source(tmp_path).left_out.counts == left_out
    assert "1 link to what lies in the source (a/linked.png)" in left_out_of(tmp_path)
    with pytest.raises(ValueError, match="run is the directory of a run or a pack: give a folder of images, or"):
        read_source(tmp_path / "run")


LIST_AND_WAIT = """
import sys, time
from pathlib import Path
from trainer.data import numbered_shards
from trainer.data.reading import read_source

numbered_shards.SHARDS_A_PROCESS, numbered_shards.usable_cores = 1, lambda: 4
read_source(Path(sys.argv[1]))
print("listed", flush=True)
time.sleep(600)
"""


def test_what_lists_shards_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    for number in range(4):
        write_shard(tmp_path / f"{number:05d}.tar", ["0", "1"])
    command = [sys.executable, "-c", LIST_AND_WAIT, str(tmp_path / "{00000..00003}.tar")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout
        assert started.stdout.readline() == "listed\n"
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        started.kill()

    def lists(process: str) -> bool:
        try:
            return b"LokyProcess" in Path("/proc", process, "cmdline").read_bytes()  # empty of one that has ended
        except OSError:
            return False

    assert len(children) >= 2
    wait_until(lambda: not any(map(lists, children)))


LISTS = [
    ("list.txt", "a.jpg\t", "a.jpg=-1"),
    ("list.txt", "a.jpg\tbig dog", "a.jpg=big dog"),
    ("list.txt", "a.jpg big dog", "a.jpg=big dog"),
    ("list.txt", "a.jpg\tcat\tdog\nb.jpg\tcow", "a.jpg=cat dog | b.jpg=cow"),
    ("list.txt", "my cat.jpg big dog", "my cat.jpg=big dog"),
    ("list.txt", "my cat.jpg\n", "my cat.jpg=-1"),
    ("list.txt", "a.jpg copy.jpg", "a.jpg copy.jpg=-1"),
    ("list.txt", "bare 7", "bare=7"),
    ("list.txt", '"my cat.jpg" 7', "my cat.jpg=7"),
    ("list.txt", 'a.jpg "cat dog"\nb.jpg\t"cow"\n', "a.jpg=cat dog | b.jpg=cow"),
    ("list.txt", " a.jpg 7 \r\n\nb.jpg 4", "a.jpg=7 | b.jpg=4"),
    ("list.txt", "my.png files/img 3\na.jpg 4", "my.png files/img=3 | a.jpg=4"),
    ("list.txt", "my.png files/img\na.jpg", "my.png files/img=-1 | a.jpg=-1"),
    ("list.txt", "a.jpg cats/big\nb.jpg cats/3 4", "a.jpg=cats/big | b.jpg=cats/3 4"),
    ("list.txt", "a b.jpg my cat.png dog\na.jpg\tmy cat", "a b.jpg my cat.png=dog | a.jpg=my cat"),
    ("list.txt", f"a.jpg {'x' * 300}/y", f"a.jpg={'x' * 300}/y"),
    ("list.txt", "{root}/a.jpg\t0\nb.jpg 4", "{root}/a.jpg=0 | b.jpg=4"),
    ("list.txt", "\ufeffa.jpg 3\nb.jpg 4\n./a.jpg 3\na.jpg 3", "a.jpg=3 | b.jpg=4"),
    ("breaks.csv", 'path,caption,label\na.jpg,x\u2028y,1\nb.jpg,"two\nlines",2', "a.jpg=1 | b.jpg=2"),
    ("tabs.tsv", 'path\tcaption\tlabel\na.jpg\tthe ""best""\t1\nb.jpg\tx\t2\t\n', "a.jpg=1 | b.jpg=2"),
    ("list.jsonl", '{"image": "b.jpg", "label": 3}\n{"image": "a.jpg"}', "b.jpg=3 | a.jpg=-1"),
    ("list.json", '[{"image": "b.jpg", "label": 3}, {"image": "a.jpg"}]', "b.jpg=3 | a.jpg=-1"),
    ("blank.csv", "\r\n\r\npath;label\r\na.jpg;3\r\n", "a.jpg=3"),
    ("gaps.csv", "path,label\na.jpg,cat\nb.jpg,-1.0\nbare,-2\n", "a.jpg=cat | b.jpg=-1 | bare=-1"),
]


@pytest.mark.parametrize(("name", "content", "found"), LISTS)
def test_no_line_of_a_list_is_lost(name: str, content: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "my.png files").mkdir()
    for image in ("a.jpg", "b.jpg", "my cat.jpg", "a.jpg copy.jpg", "bare", "my.png files/img", "a b.jpg my cat.png"):
        (tmp_path / image).write_bytes(jpeg(1))
    (tmp_path / name).write_text(content.replace("{root}", str(tmp_path)), encoding="utf-8", newline="")
    listing, split = listed(tmp_path / name)
    labels = [split.classes[entry.label] if split.classes and entry.label >= 0 else entry.label for entry in listing]
    rows = map("{}={}".format, paths(listing), labels)
    assert " | ".join(rows) == found.format(root=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("list.txt", "b.jpg 1\n# a.jpg 1\n", "line 2: comments are not supported"),
        ("list.txt", "b.jpg 1\na.jpg\n", "line 2: no label: give all images a label"),
        ("list.txt", "nowhere.jpg\n", r"none of the 1 paths that were looked for exists, first nowhere\.jpg"),
        ("list.jsonl", '{"path": "a.jpg", "label": [1, 2]}\n', r"line 1: \[1, 2\] is no label"),
        ("open.tsv", 'path\tcaption\tlabel\na.jpg\tx\t1\nb.jpg\t"Hello\t2\nc.jpg\tx\t3\n', "line 3: not CSV"),
        ("inner.csv", 'path,caption,label\na.jpg,"to be" or not,1\nb.jpg,x,2\n', "line 2: not CSV"),
        ("large.csv", f"path,caption\na.jpg,{'x' * 140_000}\n", "line 2: not CSV"),
        ("comma.csv", "path,caption,label\na.jpg,x,1\nb.jpg,a dog, in snow,2\n", "line 3: 4 cells for 3 columns"),
        ("caption.csv", f"{'x' * 300},b.jpg\n", "none of the 1 paths that were looked for exists, first xx"),
        ("own.csv", "a,b\nx.jpg,1\n", "has the columns a, b: name that of the images by --image-column"),
        ("twice.csv", "path,label,label\na.jpg,1,2\n", "has 2 columns 'label': rename all but one of them"),
        ("half.jsonl", '{"path": "a.jpg", "label": "\\ud83d"}\n', r"line 1: '\\ud83d' has half of a character"),
        ("half.json", '[{"path": "\\ud83d.jpg"}]', r"object 1: '\\ud83d.jpg' has half of a character"),
        ("deep.jsonl", f'{{"path": {"[" * 100_000}\n', "line 1: not a JSON object"),
        ("deep.json", f'[{{"path": {"[" * 100_000}\n', "not a JSON array of objects"),
        ("zero.txt", "a.jpg\n" * 1_000 + "b\0.jpg\n", r"line 1001: 'b\\x00.jpg' is no path: remove the zero byte"),
        ("utf16.csv", "path,label\na.jpg,1\n", "is text in UTF-16: save it in UTF-8"),
    ],
)
def test_a_list_that_cannot_be_read_is_one_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-16" if name == "utf16.csv" else "utf-8")
    with pytest.raises(ValueError, match=f"{name}.*{message}") as caught:
        read_source(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_path_of_a_list_that_is_no_file_is_a_broken_image(tmp_path: Path) -> None:
    """Whoever opens a pipe waits for its writer, and whoever reads a device fills the memory."""
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "list.txt").write_text("pipe.jpg\n/dev/zero\n")
    write_table(tmp_path / "table.parquet", image=[{"bytes": None, "path": "pipe.jpg"}])
    for name in ("list.txt", "table.parquet"):
        listing = read_source(tmp_path / name).train.listing
        for image in range(len(listing)):
            with pytest.raises(OSError, match="not a file"):
                listing.read(image)


def test_every_line_of_a_list_is_accounted_for(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(1))
    (tmp_path / "list.csv").write_text("path,label\na.jpg,cat\nb.jpg,dog\na.jpg,cat\n,0\nb.jpg,cat\n")
    assert listed(tmp_path / "list.csv")[0].labels().tolist() == [0, 1]
    assert left_out_of(tmp_path / "list.csv") == (
        "1 name that comes again (a.jpg), 1 line without a path (list.csv, line 5), "
        "1 name that comes again with another label (the first is kept) (b.jpg)"
    )


def test_lists_of_other_programs(tmp_path: Path) -> None:
    plain_tree(tmp_path, 6)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jpg"))
    lists = {
        "header.csv": "\n".join(["id;Path;label", *(f"{i};{name};{i % 2}" for i, name in enumerate(names))]),
        "quoted.csv": "\n".join(f'"{name}",{i % 2}' for i, name in enumerate(names)),
        "lines.jsonl": "\n".join(json.dumps({"file_name": name, "label": i % 2}) for i, name in enumerate(names)),
        "array.json": json.dumps([{"file_name": name, "label": i % 2} for i, name in enumerate(names)], indent=1),
        "quoted.txt": "\n".join(f'"{name}" {i % 2}' for i, name in enumerate(names)),
        "backslash.txt": "\n".join(name.replace("/", "\\") + f"\t{i % 2}" for i, name in enumerate(names)),
    }
    (tmp_path / "column.csv").write_text("\n".join(["path", *names]))
    assert paths(listed(tmp_path / "column.csv")[0]) == names
    for name, content in lists.items():
        (tmp_path / name).write_text(content)
        listing, found = listed(tmp_path / name)
        assert (paths(listing), listing.labels().tolist(), found.classes) == (names, [0, 1] * 3, ()), name
    (tmp_path / "own.csv").write_text("a,b\n" + "\n".join(f"{name},x{i}" for i, name in enumerate(names)))
    assert not listed(tmp_path / "own.csv", image_column="a")[1].labelled
    reading = read_source(tmp_path / "own.csv", SourceOptions(image_column="a"))
    assert any("--label-column" in line for line in reading.lines())
    assert listed(tmp_path / "own.csv", image_column="a", label_column="b")[1].classes[:2] == ("x0", "x1")


@pytest.mark.parametrize(("number", "said"), [(300, "300 of 306"), (4_002, "about 4,000 of 4,008")])
def test_a_list_says_how_many_of_its_images_are_missing(number: int, said: str, tmp_path: Path) -> None:
    names = [str(path.relative_to(tmp_path)) for path in sorted(plain_tree(tmp_path, 6).rglob("*.jpg"))]
    (tmp_path / "list.txt").write_text("\n".join([*names, *(f"gone/{image}.jpg" for image in range(number))]))
    reading = read_source(tmp_path / "list.txt")
    assert len(reading.train.listing) == 6 + number, "rows keep their images: each may come back"
    assert f"{said} images do not exist, first gone/" in " ".join(reading.notes)


def test_a_list_of_names_with_other_accents_says_so(tmp_path: Path) -> None:
    for name in ("a.jpg", "cafe\u0301.jpg"):
        (tmp_path / name).write_bytes(jpeg(1))
    (tmp_path / "list.txt").write_text("a.jpg\ncaf\u00e9.jpg\n", encoding="utf-8")
    said = "1 of 2 images do not exist, first café.jpg (files have their accents in the form NFD: convert the list)"
    assert any(said in note for note in read_source(tmp_path / "list.txt").notes)


def test_lists_are_read_line_by_line(tmp_path: Path) -> None:
    number, caption = 3_000, "word " * 30
    (tmp_path / "0.jpg").write_bytes(b"x")
    lines = [f"{image}.jpg,class {image % 7},{caption}\n" for image in range(number)]
    (tmp_path / "list.csv").write_text("image,label,caption\n" + "".join(lines))
    objects = [{"image": f"{image}.jpg", "label": image % 7, "caption": caption} for image in range(number)]
    (tmp_path / "list.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, objects)), encoding="utf-8")
    for name in ("list.csv", "list.jsonl"):
        assert len(read_source(tmp_path / name).train.listing) == number
        assert peak_memory(partial(read_source, tmp_path / name)) / number < 400, name


def test_paths_are_made_of_the_columns_of_a_list(tmp_path: Path) -> None:
    """Ids without a folder and a suffix, as Kaggle's tables have them."""
    (tmp_path / "train").mkdir()
    for number in range(4):
        (tmp_path / f"train/{number:03d}.jpg").write_bytes(jpeg(number))
    (tmp_path / "train.csv").write_text("id,breed\n000,x\n001,y\n,x\n003,x\n")
    with pytest.raises(ValueError, match=r"columns id, breed: .*, or make their paths of it: 'train/\{id\}\.jpg'"):
        read_source(tmp_path / "train.csv")
    listing, found = listed(tmp_path / "train.csv", image_column="train/{id}.jpg", label_column="breed")
    assert paths(listing) == ["train/000.jpg", "train/001.jpg", "train/003.jpg"]
    assert (listing.labels().tolist(), found.classes) == ([0, 1, 0], ("x", "y"))
    with pytest.raises(ValueError, match=r"--image-column name: .* has the columns id, breed"):
        read_source(tmp_path / "train.csv", SourceOptions(image_column="train/{name}.jpg"))
    (tmp_path / "list.json").write_text('[{"id": 2, "kind": 0}, {"id": 1}]')
    listing, _ = listed(tmp_path / "list.json", image_column="train/{kind}0{id}.jpg")
    assert paths(listing) == ["train/002.jpg"]
    table = write_table(tmp_path / "list.parquet", id=[2, 0], breed=["x", "y"])
    listing, _ = listed(table, image_column="train/00{id}.jpg")
    assert paths(listing) == ["train/002.jpg", "train/000.jpg"]


@pytest.mark.parametrize(
    "content",
    [
        '["a.jpg", "b.jpg"]' * 10_000,
        "[" + json.dumps({"image": "x" * 200_000}),
        "x" * 200_000,
        "y" * 200_000 + "\tlabel",
        ",".join(f"column {number}" for number in range(10_000)) + "\n1",
    ],
)
def test_a_message_quotes_no_long_line(content: str, tmp_path: Path) -> None:
    for name in ("list.txt", "list.csv"):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=name) as raised:
            read_source(tmp_path / name)
        assert len(str(raised.value)) < 400 + len(str(tmp_path))
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    (tmp_path / "list.txt").write_text(f"a.jpg\t{'x' * 200_000}\nb.jpg\t1\nc.jpg\t{'y' * 200_000}\n")
    assert max(map(len, read_source(tmp_path / "list.txt").lines())) < 500


def test_tables_of_images(tmp_path: Path) -> None:
    """Parquet files of Hugging Face's hub, a data set that `datasets` saved, and a table of paths."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    images = [{"bytes": jpeg(number), "path": None} for number in range(6)]
    table = arrow.table({"image": images, "label": [0, 1, -1, 0, 1, None]}).replace_schema_metadata(metadata)
    (tmp_path / "hub/data").mkdir(parents=True)
    (tmp_path / "saved/train").mkdir(parents=True)
    (tmp_path / "feather").mkdir()
    for split in ("train", "test"):
        parquet.write_table(table, tmp_path / f"hub/data/{split}-00000-of-00001.parquet", row_group_size=4)
    path = tmp_path / "saved/train/data-00000-of-00001.arrow"
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=4)
    for name in ("feather/train.arrow", "feather/test.feather"):
        with arrow.ipc.new_file(str(tmp_path / name), table.schema) as feather:
            feather.write_table(table, max_chunksize=4)
    (tmp_path / "saved/train/state.json").write_text("{}")
    for source, splits in (("hub", ["train", "test"]), ("saved", [""]), ("feather", ["train", "test"])):
        reading = read_source(tmp_path / source)
        assert [split.name for split in reading.splits] == splits
        assert reading.train.classes == ("cat", "dog")
        assert Reason.TABLE not in reading.left_out.counts
        assert reading.train.listing.labels().tolist() == [0, 1, -1, 0, 1, -1]
        assert [reading.train.listing.read(image) for image in range(6)] == [jpeg(image) for image in range(6)]
        pack(tmp_path / source, tmp_path / f"packed-{source}", PackOptions())
        assert len(PackedImages(tmp_path / f"packed-{source}")) == 6


def test_row_groups_that_are_kept_take_a_share_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tables there are: a row group may be as large as its file."""
    arrow = pytest.importorskip("pyarrow", reason="no pyarrow")
    images = [np.random.default_rng(number).bytes(50_000) for number in range(24)]
    for number in range(12):
        write_table(tmp_path / f"{number:02d}.parquet", image=images[2 * number : 2 * number + 2])
    kept, size = tables._Kept(), sum(map(len, images)) // 3
    monkeypatch.setattr(tables, "_kept", kept)
    monkeypatch.setattr(tables, "usable_memory", lambda: size * tables._KEPT_SHARE)
    reading, before = read_source(tmp_path), arrow.total_allocated_bytes()
    assert any("row groups, of 0 MiB here, and more than fit into" in note for note in reading.notes)
    listing = reading.train.listing
    for image in [*range(24), *range(24)]:
        assert listing.read(image) == images[image]
        assert sum(column.nbytes for column in kept._columns.values()) == kept._bytes <= size
    assert len(kept._columns) > 1
    assert arrow.total_allocated_bytes() - before < 1.2 * size


def test_a_compressed_table_is_not_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, feather = (pytest.importorskip(one, reason="no pyarrow") for one in ("pyarrow", "pyarrow.feather"))
    images = [np.random.default_rng(number).bytes(50_000) for number in range(24)]
    table = arrow.table({"image": images, "label": [*range(24)]})
    feather.write_feather(table, str(tmp_path / "a.feather"), chunksize=2)
    monkeypatch.setattr(tables, "_kept", tables._Kept())
    monkeypatch.setattr(tables, "usable_memory", lambda: 200_000 * tables._KEPT_SHARE)
    before = arrow.total_allocated_bytes()
    listing = read_source(tmp_path / "a.feather").train.listing
    assert [listing.read(image) for image in range(24)] == images
    assert listing.labels().tolist() == [*range(24)]
    assert arrow.total_allocated_bytes() - before < 300_000


def test_tables_lose_nothing_without_a_line(tmp_path: Path) -> None:
    names = sorted(str(path.relative_to(tmp_path)) for path in plain_tree(tmp_path, 6).rglob("[abc]/*.jpg"))

    def table(name: str, column: Sequence[Any], labels: Sequence[Any]) -> Path:
        return write_table(tmp_path / name, image=column, label=labels)

    listing, found = listed(table("list.parquet", [*names, None, "", names[0]], [*"xyzxyz", "x", "x", "x"]))
    assert (paths(listing), found.classes) == (names, ("x", "y", "z"))
    assert left_out_of(tmp_path / "list.parquet") == (
        f"2 lines without a path (first list.parquet, row 6), 1 name that comes again ({names[0]})"
    )
    with pytest.raises(ValueError, match=r"none of the 1 paths that were looked for exists, first gone\.jpg"):
        read_source(table("gone.parquet", ["gone.jpg"], [0]))
    beside = table("beside.parquet", [{"bytes": None, "path": name} for name in names], [b"x", b"y"] * 3)
    listing, found = listed(beside)
    assert (listing.read(1), found.classes) == ((tmp_path / names[1]).read_bytes(), ("x", "y"))
    for name in ("two/A.PARQUET", "two/b.parquet", "two/cache-1.parquet"):
        table(name, [jpeg(1), jpeg(2)], [0, 1])
    assert read_source(tmp_path / "two").train.listing.labels().tolist() == [0, 1, 0, 1]
    assert left_out_of(tmp_path / "two") == "1 table (Parquet or Arrow) that is not read (cache-1.parquet)"
    for name in ("hub/small/train-00000-of-00001", "hub/small/test-00000-of-00001", "hub/full/train/0000"):
        table(f"{name}.parquet", [jpeg(1)], [0])
    with pytest.raises(ValueError, match="the tables in full, small are data sets with splits of their own"):
        read_source(tmp_path / "hub")
    assert [split.name for split in read_source(tmp_path / "hub/small").splits] == ["train", "test"]
    assert [split.name for split in read_source(tmp_path / "hub/small", SourceOptions(split="none")).splits] == [""]
    content = bytearray(table("damaged.parquet", [jpeg(1)] * 50, list(range(50))).read_bytes())
    footer = int.from_bytes(content[-8:-4], "little") + 8
    content[4:-footer] = bytes(len(content) - footer - 4)
    (tmp_path / "damaged.parquet").write_bytes(content)
    with pytest.raises(OSError, match=r"damaged\.parquet is damaged"):
        read_source(tmp_path / "damaged.parquet")


def test_a_table_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"a.parquet is a table of images, which needs pyarrow: pip install"):
        read_source(tmp_path / "a.parquet")


def test_some_images_may_have_no_label(tmp_path: Path) -> None:
    plain_tree(tmp_path, 6)
    names = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*.jpg"))]
    texts = ["cat", "", "dog", "-1", "cat", ""]
    (tmp_path / "list.csv").write_text("path,label\n" + "\n".join(map(",".join, zip(names, texts, strict=True))))
    listing, found = listed(tmp_path / "list.csv")
    assert (listing.labels().tolist(), found.classes) == ([0, -1, 1, -1, 0, -1], ("cat", "dog"))
    line = "3 images have no label: training uses all, evaluations and probes do not"
    assert line in read_source(tmp_path / "list.csv").lines()
    for dataset in datasets(tmp_path / "list.csv", tmp_path / "packed"):
        assert (len(dataset.train_images), dataset.train_labels.tolist()) == (6, [0, -1, 1, -1, 0, -1])
        part = dataset.evaluated
        assert (len(part.train_images), part.train_labels.tolist()) == (3, [0, 1, 0])
        assert torch.equal(part.train_images[:], dataset.train_images[torch.tensor([0, 2, 4])])


def test_a_label_with_a_comma_is_one_label(tmp_path: Path) -> None:
    for name in ("a", "b, c"):
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "0.jpg").write_bytes(jpeg(1))
    (tmp_path / "set/notes.txt").write_text("x")
    lines = list(inspect_source(tmp_path / "set", SourceOptions()))
    assert "  images in class folders: 2 images, 2 classes (a, 'b, c')" in lines
    assert "  classes, largest first: a 1, 'b, c' 1" in lines
    shutil.rmtree(tmp_path / "set/a")
    assert "2 files: 1 image, 1 left out" in read_source(tmp_path / "set").lines()


def test_numbers_of_one_class_are_no_labels(tmp_path: Path) -> None:
    plain_tree(tmp_path, 120)
    names = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*.jpg"))]
    (tmp_path / "list.txt").write_text("".join(f"{name} 0\n" for name in names))
    for dataset in datasets(tmp_path / "list.txt", tmp_path / "packed"):
        assert (dataset.labelled, dataset.can_hold_out) == (False, False)
        assert "one class" in dataset.untested


@pytest.mark.parametrize("named", [True, False])
def test_test_images_of_unknown_classes_are_omitted_with_a_line(
    named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those only, whether classes have names or numbers; all if no training image is of any of the classes."""
    classes = ["cat", "dog", "eel", "fox"] if named else ["3", "5", "4", "8"]

    write_shard(tmp_path / "train-000000.tar", classes[:2] * 3)
    write_shard(tmp_path / "test-000000.tar", classes[:2] * 3 + classes[2:] * 3)
    pack(tmp_path, tmp_path / "packed", PackOptions())
    for kind, source in (("folder", tmp_path), ("packed", tmp_path / "packed")):
        caplog.clear()
        dataset = load_dataset(kind, source, image_size=8)
        (line,) = [record.getMessage() for record in caplog.records if "no training image" in record.getMessage()]
        assert "6 test images of classes that no training image has (first " in line
        assert line.endswith("test-000000.tar:0006.jpg)")
        assert dataset.evaluated.test_labels.tolist() == dataset.evaluated.train_labels.tolist()
        assert torch.equal(dataset.evaluated.test_images[:], dataset.train_images[:])
        facts, _ = survey(dataset, packed=kind == "packed")
        assert facts.num_tests == 6
        others = ", ".join(sorted(classes[2:]))
        line = f"  6 images of classes that no training image has, not evaluated: {others}"
        assert [one for one in inspect_source(source, SourceOptions()) if "no training image" in one] == [line]
    write_shard(tmp_path / "test-000000.tar", classes[2:] * 3)
    without = load_dataset("folder", tmp_path, image_size=8)
    assert (len(without.test_images), without.can_hold_out) == (0, False)
    with pytest.raises(
        ValueError, match=r"no training image is of a class of the test images .*: train with --no-eval"
    ):
        without.check_evaluated(trained_on_labels=False)


def test_few_labels_hold_nothing_out_of_a_folder_or_its_pack(tmp_path: Path) -> None:
    plain_tree(tmp_path, 120)
    names = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*.jpg"))]
    for few, can_hold_out in ((99, False), (100, True)):
        labels = [number % 2 if number < few else -1 for number in range(len(names))]
        (tmp_path / "list.txt").write_text("".join(map("{} {}\n".format, names, labels)))
        for dataset in datasets(tmp_path / "list.txt", tmp_path / f"packed{few}"):
            assert dataset.can_hold_out == can_hold_out


def test_test_images_without_labels_are_not_evaluated(tmp_path: Path) -> None:
    plain_tree(tmp_path / "set/train", 120)
    (tmp_path / "set/test").mkdir()
    (tmp_path / "set/test/a.jpg").write_bytes(jpeg(0))
    for dataset in datasets(tmp_path / "set", tmp_path / "packed"):
        assert (dataset.labelled, len(dataset.test_images), dataset.can_hold_out) == (True, 0, True)
    plain_tree(tmp_path / "set/val", 6)
    reading = read_source(tmp_path / "set")
    assert [split.name for split in reading.splits] == ["train", "val", "test"]
    assert "test/ has no labels: val/ is for evaluation" in reading.notes
    assert len(load_dataset("folder", tmp_path / "set").test_images) == 6


def test_a_zip_is_read_as_the_folder_that_was_packed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "windows.zip", "w") as archive:
        for name in ("a\\0.jpg", "a\\1", "b\\0.jpg", "b\\2"):
            archive.writestr(name, jpeg(1))
        link = zipfile.ZipInfo("b\\link.jpg")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        archive.writestr(link, "0.jpg")
        offset = archive.getinfo("b\\2").header_offset
    content = bytearray((tmp_path / "windows.zip").read_bytes())
    content[offset + 50 : offset + 60] = bytes(10)
    (tmp_path / "windows.zip").write_bytes(content)
    listing, found = listed(tmp_path / "windows.zip")
    assert (listing.labels().tolist(), found.classes) == ([0, 0, 1], ("a", "b"))
    assert listing.read(2) == jpeg(1)
    assert left_out_of(tmp_path / "windows.zip") == r"2 files that cannot be read (first windows.zip:b\link.jpg)"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_image_in_a_zip_is_a_broken_one(method: int, tmp_path: Path) -> None:
    source, noise = tmp_path / "images.zip", np.random.default_rng(0).bytes(1000)
    with zipfile.ZipFile(source, "w", method) as archive:
        for name in ("1.jpg", "2.jpg"):
            archive.writestr(name, noise)
    content = bytearray(source.read_bytes())
    content[200:400] = bytes(200)
    source.write_bytes(content)
    listing, _ = listed(source)
    assert listing.read(1) == noise
    with pytest.raises(OSError, match=r"damaged in its zip file|Invalid data stream"):
        listing.read(0)


def test_a_tar_that_ends_with_a_zip_is_a_tar(tmp_path: Path) -> None:
    last = write_zip(tmp_path / "a.zip", {"other.jpg": jpeg(0)}).read_bytes()
    write_tar(tmp_path / "a.tar", {"1.jpg": jpeg(1), "2.jpg": jpeg(2), "a.zip": last})
    assert [entry.member for entry in read_source(tmp_path / "a.tar").train.listing] == ["1.jpg", "2.jpg"]


def test_images_beside_splits_or_a_single_folder_are_named(tmp_path: Path) -> None:
    plain_tree(tmp_path / "a/images", 12)
    (tmp_path / "a/preview.png").write_bytes(b"x")
    for stray, number in ((None, 12), ("ignore", 12), ("use", 13)):
        listing, found = listed(tmp_path / "a", stray=stray)
        assert (len(listing), found.classes) == (number, ("a", "b", "c")), stray
    plain_tree(tmp_path / "b/train", 6)
    plain_tree(tmp_path / "b/test", 3)
    (tmp_path / "b/preview.png").write_bytes(b"x")
    assert left_out_of(tmp_path / "b") == "1 image beside the folders (--stray use keeps it) (preview.png)"
    reading = read_source(tmp_path / "b", SourceOptions(stray="use"))
    assert [split.counts[-1] for split in reading.splits] == [1, 0]
    assert not reading.left_out.counts


@pytest.mark.parametrize(
    ("texts", "labels", "classes", "note"),
    [
        (("0", "nan", "-1.0", "None"), [0, -1, -1, -1], (), "missing or negative are none: -1.0, None, nan"),
        (("01", "2.0", "-2", "2"), [1, 2, -1, 2], (), "missing or negative are none: -2"),
        (("3", "cat", "3", ""), [0, 1, 0, -1], ("3", "cat"), "because 'cat' is no number: '3' is the name"),
        (("9" * 19, "1", "1", "1"), [1, 0, 0, 0], ("1", "9" * 19), ""),
        (("cat", "None", "cat", "cat"), [1, 0, 1, 1], ("None", "cat"), "'None' is read as a class"),
    ],
)
def test_labels_as_programs_write_them(
    texts: tuple[str, ...], labels: list[int], classes: tuple[str, ...], note: str, tmp_path: Path
) -> None:
    reading = read_source(write_shard(tmp_path / "s-0000.tar", texts))
    assert (reading.train.listing.labels().tolist(), reading.train.classes) == (labels, classes)
    assert note in " ".join(reading.notes)


def left_out_of(source: Path) -> str:
    return read_source(source).left_out.line(source).removeprefix(f"left out of {source}: ")


def test_links_double_no_image(tmp_path: Path) -> None:
    tree = plain_tree(tmp_path / "tree", 6)
    once = paths(listed(tree)[0])
    (tree / "a/loop").symlink_to("..")
    (tree / "0 linked folder").symlink_to("b")  # listed before what it leads to
    (tree / "c/linked file.jpg").symlink_to("../a/0000.jpg")
    (tree / "self").symlink_to("self")
    listing, found = listed(tree)
    assert (paths(listing), found.classes) == (once, ("a", "b", "c"))
    assert (
        left_out_of(tree)
        == "3 links to what lies in the source (first 0 linked folder), 1 link to a missing file (self)"
    )


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
    assert found.classes == ("a", "b", "c", "d", "e")
    assert left_out_of(tree) == "3 links to what lies in the source (first d/back), 1 hidden file (e/.hidden)"


def test_missing_and_empty_files_are_left_out_and_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = plain_tree(tmp_path / "tree", 6)
    once, size = paths(listed(tree)[0]), len(listed(tree)[0])
    for number in range(5):
        (tree / f"a/tab\t{number}.jpg").write_bytes(b"x")
    (tree / "stray.jpg").write_bytes(b"")  # no image beside the folders, which stay classes
    (tree / "c/zero.png").write_bytes(b"")
    (tree / "b/gone.jpg").symlink_to("nothing")
    for pipe in ("manifest.json", "pipe.jpg", "pipe.txt"):  # whoever opens one waits
        os.mkfifo(tree / "b" / pipe)
    (tree / "empty class").mkdir()
    (tree / "empty class/zero.jpg").write_bytes(b"")
    for _ in range(2):  # as an `images` run, which lists them before and when it begins
        dataset = load_dataset("folder", tree)
        assert (len(dataset.train_images), dataset.class_names) == (size, ("a", "b", "c"))
    assert paths(listed(tree)[0]) == once
    (record,) = caplog.records
    assert record.getMessage() == (
        f"left out of {tree}: 5 names with a tab or a line break (first 'a/tab\\t0.jpg'), 1 link to a missing file "
        "(b/gone.jpg), 3 names that are no files (first b/manifest.json), 3 empty files (first c/zero.png)"
    )
    pack(tree, tmp_path / "packed", PackOptions())
    assert capsys.readouterr().err == f"{record.getMessage()}\n"
    for path in tree.rglob("0*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no images in .*/tree \(left out of .*: .* empty files"):
        load_dataset("folder", tree)


def test_names_of_any_bytes(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9 \xf0\x9f\x98\x80.jpg")
    (tmp_path / name).write_bytes(b"x")
    listing, _ = listed(tmp_path)
    assert listing.read(0) == b"x"
    for other in ("two\nlines.jpg", "y.jpg"):
        (tmp_path / other).write_bytes(b"x")
    assert paths(listed(tmp_path)[0]) == [name, "y.jpg"]


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
        assert torch.equal(again[2:3], again[3:4]), "the next one"
        again[:]
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 3, "however often each is read"
    assert f"broken image: {gone} (link to a missing file)" in {line.partition(": the next")[0] for line in named}
    assert sum("the next intact one is shown" in line for line in named) == 1
    assert all(line.count(str(tmp_path)) == 1 for line in named)


def test_a_listing_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"0\t-1\t-1\tcut off"):
        with pytest.raises(ValueError, match="empty or cut off"):
            Listing(content, tmp_path)


@pytest.mark.parametrize("number", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("scanned", [7, 640, 1 << 24])
def test_a_listing_finds_each_of_its_lines(
    number: int, scanned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pieces in which the file is searched for lines."""
    monkeypatch.setattr(listing_module, "_SCANNED_BYTES", scanned)
    entries = [Entry(image % 3, -1, -1, "x" * (image % 7) + f"{image}.jpg", "") for image in range(number)]
    listing = Listing(b"".join(entry.line() for entry in entries), tmp_path)
    assert len(listing) == number
    assert list(listing) == entries
    assert [listing[image] for image in range(number)] == entries
    assert listing.labels().tolist() == [entry.label for entry in entries]
    for image in (-1, number):
        with pytest.raises(IndexError):
            listing[image]


@pytest.mark.parametrize("name", ["images.zip", "images.parquet"])
def test_an_archive_that_is_written_anew_is_read_anew(name: str, tmp_path: Path) -> None:
    source = tmp_path / name
    for images in ([jpeg(0), jpeg(1)], [jpeg(0), jpeg(1), jpeg(2)]):
        if name.endswith(".zip"):
            write_zip(source, {f"{number}.jpg": image for number, image in enumerate(images)})
        else:
            write_table(source, image=images)
        listing, _ = listed(source)
        assert [listing.read(image) for image in range(len(listing))] == images


def test_a_table_that_is_replaced_while_it_is_opened_shows_no_other_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, source = [jpeg(1), jpeg(2)], tmp_path / "images.parquet"

    def replace_by(rows: list[bytes]) -> None:
        write_table(tmp_path / "new", image=rows).replace(source)

    replace_by(images)
    listing, _ = listed(source)
    tables._opened.cache_clear()  # as in another process
    mark = tables.mark

    def replaced_then(path: Path) -> int:
        found = mark(path)
        replace_by(images[::-1])
        return found

    with monkeypatch.context() as patched:
        patched.setattr(tables, "mark", replaced_then)
        assert listing.read(0) == images[0]
    with pytest.raises(ValueError, match=r"images\.parquet is another table than was listed"):
        listing.read(0)
