"""Packed and plain images give the same pixels and train to the same losses, bit for bit on one machine."""

from __future__ import annotations

import errno
import json
import os
import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.conditions import no_condition_in_this_thread
from tests.helpers.image_tree import encoded, odd_tree, piece, plain_tree
from tests.helpers.small_run import ONLY_ROWS, losses, small_run
from trainer.data import decoded_images, load_dataset
from trainer.data.augment import Augmentation, AugmentationConfig
from trainer.data.config import SourceOptions
from trainer.data.decode import Crop, centre, decode
from trainer.data.decoded_images import DecodedImages
from trainer.data.index import INDEX
from trainer.data.listing import Entry, Listing
from trainer.data.manifest import Manifest
from trainer.data.pack import PackOptions, pack
from trainer.data.packed import PackedImages
from trainer.evaluate.features import encoder_features
from trainer.export.__main__ import main as export_rows
from trainer.loop import train
from trainer.schedule import visit_uniforms
from weightserver.common.threads import in_other_thread
from weightserver.core.arrays import Int64Array
from weightserver.torch import RangesOrder

NUM_IMAGES = 290
SIDE = 18
"""Of the squares whose centres of 16 are evaluated."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training images with broken ones among them, and test images."""
    root = tmp_path_factory.mktemp("images")
    odd_tree(root / "train", NUM_IMAGES)
    plain_tree(root / "val", 30, first=NUM_IMAGES)
    return root


@pytest.fixture(scope="module")
def directory(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    pack(folder / "train", directory, PackOptions(tar_bytes=50_000))
    pack(folder / "val", directory / "test", PackOptions(tar_bytes=50_000))
    return directory


def test_packed_and_plain_images_are_the_same_pixels(folder: Path, directory: Path) -> None:
    plain, packed = load_dataset("folder", folder, image_size=16), load_dataset("packed", directory, image_size=16)
    assert plain.train_images.shape == packed.train_images.shape == (NUM_IMAGES + 13, 3, SIDE, SIDE)
    assert torch.equal(plain.train_images[:], packed.train_images[:])
    assert torch.equal(plain.test_images[:], packed.test_images[:])
    assert torch.equal(plain.test_labels, packed.test_labels)
    assert torch.equal(plain.train_labels, packed.train_labels), "of substitutes too"


def test_a_batch_is_its_images_in_any_order(directory: Path) -> None:
    images = load_dataset("packed", directory, image_size=16).train_images
    everything = images[:]
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, len(images), 70))
    assert torch.equal(images[ids], everything[ids])
    assert images[ids[:0]].shape == (0, 3, SIDE, SIDE)
    source = PackedImages(directory)
    assert np.array_equal(everything[7].numpy(), decode(source.read(7), [Crop(SIDE, centre)])[0])
    with ThreadPoolExecutor(4) as pool:
        for batch in pool.map(lambda start: images[start : start + 20], range(0, 200, 20)):
            assert batch.shape == (20, 3, SIDE, SIDE)


def test_a_view_depends_on_no_other_image_and_no_thread(directory: Path) -> None:
    source = PackedImages(directory)
    augmentations = [Augmentation(AugmentationConfig(), 16), Augmentation(AugmentationConfig(min_scale=0.05), 8)]
    ids = np.random.default_rng(0).integers(0, len(source), 40)
    uniforms = visit_uniforms(3, np.arange(80).reshape(2, 40), Augmentation.num_uniforms)
    crops = DecodedImages(source, SIDE, threads=4).crops(ids, augmentations, uniforms)
    assert [crop.shape for crop in crops] == [(40, 3, 16, 16), (40, 3, 8, 8)]
    alone = DecodedImages(source, SIDE, threads=1)
    for place in range(40):
        one = slice(place, place + 1)
        found = alone.crops(ids[one], augmentations, uniforms[:, one])
        assert all(torch.equal(crop, all_crops[one]) for crop, all_crops in zip(found, crops, strict=True))


def test_the_corners_of_an_image_are_seen_in_training_alone(tmp_path: Path) -> None:
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[:8, :8] = pixels[:8, -8:] = pixels[-8:, :8] = pixels[-8:, -8:] = 255
    Image.fromarray(pixels).save(tmp_path / "corners.png")
    images = load_dataset("folder", tmp_path, image_size=28).train_images
    assert isinstance(images, DecodedImages)
    assert not images[:].any()
    augment = Augmentation(AugmentationConfig(), 28)
    uniforms = visit_uniforms(0, np.arange(200)[None], Augmentation.num_uniforms)
    (crops,) = images.crops(np.zeros(200, np.int64), [augment], uniforms)
    assert all(crops[:, 0, y, x].max() == 255 for y in (0, -1) for x in (0, -1))


def run(output: Path, dataset: str, data_dir: Path, **changes: Any) -> list[float]:
    settings = {"dataset": dataset, "data_dir": data_dir, "num_images": None, "rows": "dense"}
    train(small_run(output, **settings | changes))
    return losses(output)


@pytest.mark.guard
def test_packed_and_plain_images_train_to_the_same_losses(folder: Path, directory: Path, tmp_path: Path) -> None:
    several = {"views": 2, "view_size": 12, "accumulate": 2, "steps": 5}
    assert run(tmp_path / "a", "folder", folder, **several) == run(tmp_path / "b", "packed", directory, **several)
    with pytest.raises(ValueError, match="packed in the order of seed 0, not 3: give --order-seed 0"):
        run(tmp_path / "other", "packed", directory, order_seed=3)


@pytest.mark.parametrize("name", ["folder", "packed"])
def test_labels_are_read_when_they_are_asked_for(
    folder: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Those of training images: training, and checking whether there are any, does not read them."""
    read: list[int] = []
    source: Any = {"folder": Listing, "packed": PackedImages}[name]
    labels = source.labels
    monkeypatch.setattr(source, "labels", lambda images: read.append(len(images)) or labels(images))
    data_dir = {"folder": folder, "packed": directory}[name]
    dataset = load_dataset(name, data_dir, image_size=16)
    dataset.check_labelled(tested=True)
    assert dataset.labelled
    assert len(dataset.first(len(dataset.train_images)).test_images) == 30
    assert len(run(tmp_path, name, data_dir, steps=2)) == 2
    assert set(read) == {30}
    assert dataset.train_labels is dataset.train_labels
    assert read.count(len(dataset.train_images)) == 1


def test_a_pack_keeps_how_its_source_was_read(tmp_path: Path) -> None:
    """Training, and packing again, need no option again; the run's settings have those about pixels."""
    for number in range(120):
        Image.fromarray(np.full((32, 32), 3_000 + number, np.uint16)).save(tmp_path / f"{number}.png")
    (tmp_path / "list.csv").write_text("a,path\n" + "".join(f"{n % 2},{n}.png\n" for n in range(120)))
    options = SourceOptions(pixel_range=(0, 4_095), label_column="a")
    pack(tmp_path / "list.csv", tmp_path / "packed", PackOptions(source=options))
    assert Manifest.load(tmp_path / "packed").options == options
    images = load_dataset("packed", tmp_path / "packed").train_images[:]
    assert 186 <= int(images.min()) <= int(images.max()) <= 195
    other = SourceOptions(pixel_range=(0, 65_535))
    assert load_dataset("packed", tmp_path / "packed", options=other).train_images[:].max() < 13, "an option counts"
    run(tmp_path / "run", "packed", tmp_path / "packed", steps=2, rows="resident")
    again = {"resume": True, "rows": "resident"}
    assert json.loads((tmp_path / "run/config.json").read_text())["pixel_range"] == [0, 4_095]
    run(tmp_path / "run", "packed", tmp_path / "packed", steps=3, **again, alpha="show", max_megapixels=179.0)
    with pytest.raises(ValueError, match="whose --alpha is show, not ignore: give the same settings"):
        run(tmp_path / "run", "packed", tmp_path / "packed", steps=3, **again, alpha="ignore")


def test_evaluation_sees_the_centre(directory: Path) -> None:
    dataset = load_dataset("packed", directory, image_size=16)
    assert dataset.evaluated_side == 16
    features = encoder_features(torch.nn.Sequential(torch.nn.Flatten(), Identity()), dataset)
    expected = dataset.test_images[:][..., 1:17, 1:17].float().flatten(1) / 127.5 - 1
    assert torch.equal(features.test, expected)


class Identity(torch.nn.Module):
    """An encoder needs a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels


@pytest.mark.guard
def test_extended_images_train_in_the_order_of_their_ranges(tmp_path: Path) -> None:
    tree, directory = plain_tree(tmp_path / "tree", 100), tmp_path / "packed"
    pack(tree, directory, PackOptions())
    old = load_dataset("packed", directory, image_size=16).train_images[:]
    pack(plain_tree(tree, 60, first=100), directory, PackOptions(extend=True))
    dataset = load_dataset("packed", directory, image_size=16)
    assert torch.equal(dataset.train_images[:100], old)
    rows = np.arange(160)
    assert np.array_equal(dataset.order(0).images(rows), RangesOrder((100, 60), 0).images(rows))
    run(tmp_path / "run", "packed", directory, steps=3, rows="resident", encoder=ONLY_ROWS)
    with pytest.raises(SystemExit) as ended:
        export_rows(["rows", str(tmp_path / "run"), "--output", str(tmp_path / "rows"), "--format", "npz"])
    assert ended.value.code == 0
    with np.load(next((tmp_path / "rows").iterdir())) as exported:
        assert np.array_equal(exported["image"], RangesOrder((100, 60), 0).images(exported["row"]))


def test_without_labels_or_test_images_one_line_says_so(tmp_path: Path) -> None:
    tree = plain_tree(tmp_path / "tree", 99)  # too few to hold some out
    pack(tree, tmp_path / "labelled", PackOptions())
    pack(plain_tree(tmp_path / "flat/x", 195) / "a", tmp_path / "unlabelled", PackOptions())
    messages = {"labelled": "has no test images", "unlabelled": "these images have no labels"}
    for directory, message in messages.items():
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "run", "packed", tmp_path / directory, evaluate=True)


class _Counted(Listing):
    """Images that are broken from the sixth to the 25th; counts how often each is read."""

    def __init__(self) -> None:
        super().__init__(b"".join(Entry(-1, -1, -1, str(image), "").line() for image in range(30)), Path())
        self.reads, self._content = Counter[int](), encoded(piece(0))

    def read(self, image: int) -> bytes:
        self.reads[image] += 1
        return b"no image" if 5 <= image < 25 else self._content


def test_broken_images_are_read_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often they are visited, and however many of them there are between a visited one and an intact one."""
    source = _Counted()
    images = DecodedImages(source, SIDE, threads=1)
    for _ in range(3):
        assert torch.equal(images[5:25], images[torch.tensor([25] * 20)])
    assert {image: count for image, count in source.reads.items() if image < 25} == dict.fromkeys(range(5, 25), 1)
    assert {record.args["image"] for record in caplog.records} == set(range(5, 25))  # type: ignore[index,call-overload]
    for ids in (range(5, 9), range(24, 4, -1)):
        some = images.chosen(np.array(ids))
        for _ in range(2):
            with pytest.raises(ValueError, match=f"all {len(ids)} images are broken: check their disk"):
                some[:]


def test_reading_a_damaged_pack_ends(tmp_path: Path) -> None:
    """If more images are broken than packing allows, however often each is read."""
    tree, packed = plain_tree(tmp_path / "tree", 1), tmp_path / "packed"
    for number in range(250):
        (tree / f"a/{number:04d}.jpg").write_bytes((tree / "a/0000.jpg").read_bytes())
    pack(tree, packed, PackOptions())
    (tar,) = packed.glob("*.tar")
    content = bytearray(tar.read_bytes())
    for number, record in enumerate(np.fromfile(packed / "index-000000000000.bin", INDEX)[:101], 1):
        content[record["offset"] : record["offset"] + 2] = b"no"
        if number >= 100:
            tar.write_bytes(content)
            images = load_dataset("packed", packed).train_images
            ended = pytest.raises(ValueError, match=r"^more than 100 of 250 images are broken, .*/a/0\d+\.jpg \(.*\w$")
            with ended if number == 101 else nullcontext():
                assert len(images[:]) == len(images[:]) == 250


@pytest.mark.parametrize("refused", [False, True])
def test_images_are_read_ahead_and_nothing_else(
    refused: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in epoch order, where neighbours in a tar are not visited at the same time; some file systems refuse it."""
    advised = []

    def advise(descriptor: int, start: int, length: int, advice: int) -> None:
        advised.append((os.pread(descriptor, length, start), advice))
        if refused:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("os.posix_fadvise", advise)
    source = PackedImages(directory)
    images = np.array([5, 250, 17])
    assert 0 < source.read_ahead(images) < 1
    assert advised == [(source.read(image), os.POSIX_FADV_WILLNEED) for image in images.tolist()]


@pytest.mark.parametrize(("share", "first", "most"), [(0.0, [1, 4, 7], 20), (0.3, [1, 3, 3], 3)])
def test_reading_ahead_keeps_its_distance(share: float, first: list[int], most: int) -> None:
    """At first a few batches, then 20; never more than may be read ahead, and to the end."""
    begun = 0

    class Files(_Counted):
        def read_ahead(self, images: Int64Array) -> float:
            nonlocal begun
            begun += 1
            return share

    ahead = DecodedImages(Files(), SIDE).read_ahead([np.array([0])] * 100, 20)
    distances = [begun - place for place, _ in enumerate(ahead, 1)]
    assert (distances[:3], max(distances), distances[-3:]) == (first, most, [2, 1, 0])
    assert len(distances) == 100


def test_no_interrupt_leaves_a_lock_taken(directory: Path) -> None:
    images = load_dataset("packed", directory, decode_threads=2).train_images
    assert isinstance(images, DecodedImages)
    before = images[:9]
    with no_condition_in_this_thread():
        again, (facts, broken) = images[:9], images.facts(np.arange(9))
    assert torch.equal(again, before)
    assert len(facts) + len(broken) == 9


def test_an_interrupt_leaves_the_other_images(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = queue.SimpleQueue[int](), threading.Event()

    def slow(_: PackedImages, image: int) -> bytes:
        begun.put(image)
        go_on.wait()
        raise OSError

    def interrupt() -> None:
        begun.get()
        raise KeyboardInterrupt

    images = load_dataset("packed", directory, decode_threads=1).train_images
    assert isinstance(images, DecodedImages)
    monkeypatch.setattr(PackedImages, "read", slow)
    monkeypatch.setattr(decoded_images, "in_other_thread", partial(in_other_thread, look=interrupt))
    with pytest.raises(KeyboardInterrupt):
        images.facts(np.arange(9))
    go_on.set()
    images._pool.shutdown()
    assert begun.empty()


def test_decode_threads_are_those_that_are_asked_for(
    folder: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unasked() -> int:
        raise AssertionError("the cores' number")

    monkeypatch.setattr("trainer.data.decoded_images.decode_threads", unasked)
    assert len(run(tmp_path, "folder", folder, steps=2, decode_threads=2)) == 2
    load_dataset("packed", directory, decode_threads=2)
    with pytest.raises(AssertionError, match="the cores' number"):
        load_dataset("packed", directory)


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("folder", None, "needs a folder: give --data-dir with the images"),
        ("folder", "nothing", "no images in"),
        ("packed", "nothing", "holds no packed images: pack them by pic pack"),
        ("folder", "packed", "holds packed images, not a folder of images: give --dataset packed"),
    ],
)
def test_wrong_places_are_refused(name: str, place: str | None, message: str, directory: Path, tmp_path: Path) -> None:
    places = {None: None, "nothing": tmp_path, "packed": directory}
    with pytest.raises(ValueError, match=message):
        load_dataset(name, places[place])


def test_a_manifest_that_cannot_be_read_is_not_told_as_none(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read \(Is a directory\): check its rights"):
        Manifest.load(tmp_path)
