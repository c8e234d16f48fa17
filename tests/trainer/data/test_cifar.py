"""CIFAR-10 is read from whatever copy people have, to the same images."""

from __future__ import annotations

import hashlib
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from trainer.data import Dataset, load_dataset
from trainer.data.cifar import CLASSES
from trainer.torchvision_schemas import import_module

NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
PER_BATCH = 10
Batches = dict[str, tuple[npt.NDArray[np.uint8], list[int]]]
"""Name to pixels [n, 3072] and labels."""


@pytest.fixture(scope="module")
def batches() -> Batches:
    """Pixels uint8 [n, 3072] and labels of each batch; each has an image of each class, in order."""
    generator = np.random.default_rng(0)
    return {name: (generator.integers(0, 256, (PER_BATCH, 3072), np.uint8), list(range(PER_BATCH))) for name in NAMES}


def write_pickles(folder: Path, batches: Batches) -> None:
    folder.mkdir()
    for name, (images, labels) in batches.items():
        content = {"batch_label": name, "labels": labels, "data": images}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def write_binary(folder: Path, batches: Batches) -> None:
    folder.mkdir()
    for name, (images, labels) in batches.items():
        records = np.concatenate([np.array(labels, np.uint8)[:, None], images], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_images(folder: Path, batches: Batches) -> None:
    for name, (images, labels) in batches.items():
        for image, label in zip(images, labels, strict=True):
            path = folder / ("test" if name == "test_batch" else "train") / CLASSES[label] / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.reshape(3, 32, 32).transpose(1, 2, 0)).save(path)


def check(found: Dataset, batches: Batches) -> None:
    assert found.class_names == CLASSES
    for images, labels, names in (
        (found.train_images, found.train_labels, NAMES[:5]),
        (found.test_images, found.test_labels, NAMES[5:]),
    ):
        expected = np.concatenate([batches[name][0] for name in names]).reshape(-1, 3, 32, 32)
        assert np.array_equal(images, expected)  # type: ignore[arg-type]
        assert labels.tolist() == list(range(PER_BATCH)) * len(names)
        assert labels.dtype == torch.int64


def test_the_binary_version_and_its_archive(batches: Batches, tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    write_binary(folder, batches)
    for place in (tmp_path, folder):
        check(load_dataset("cifar-10", place), batches)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as file:
        file.add(folder, folder.name)
    shutil.rmtree(folder)
    for place in (tmp_path, tmp_path / "cifar-10-binary.tar.gz"):
        check(load_dataset("cifar-10", place), batches)


def test_torchvisions_copy_is_read_if_its_checksums_are_right(
    batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_pickles(folder, batches)
    with pytest.raises(ValueError, match=r"cifar-10-batches-py is damaged .*: fetch it again"):
        load_dataset("cifar-10", tmp_path)
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list(CLASSES)}, protocol=2))
    made = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    theirs = import_module("torchvision.datasets").CIFAR10
    monkeypatch.setattr(theirs, "train_list", [[name, made[name]] for name in NAMES[:5]])
    monkeypatch.setattr(theirs, "test_list", [[name, made[name]] for name in NAMES[5:]])
    monkeypatch.setattr(theirs, "meta", theirs.meta | {"md5": made["batches.meta"]})
    for place in (tmp_path, folder):
        check(load_dataset("cifar-10", place), batches)


def test_folders_are_read_in_an_order_whose_first_images_are_of_all_classes(batches: Batches, tmp_path: Path) -> None:
    write_images(tmp_path, batches)
    check(load_dataset("cifar-10", tmp_path), batches)
    assert load_dataset("cifar-10", tmp_path, num_images=10).train_labels.tolist() == list(range(10))


def test_damaged_copies_are_one_line(batches: Batches, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no CIFAR-10: give a folder with cifar-10-batches-py, "):
        load_dataset("cifar-10", tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    write_binary(folder, batches)
    file = folder / "test_batch.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="a batch of 30729 bytes, which is cut off: fetch it again"):
        load_dataset("cifar-10", tmp_path)
    file.write_bytes(b"\x0a" + content[1:])
    with pytest.raises(ValueError, match="has an image of class 10: it is not CIFAR-10"):
        load_dataset("cifar-10", tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="holds no CIFAR-10"):
        load_dataset("cifar-10", tmp_path)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"cannot read .*cifar-10-binary.tar.gz"):
        load_dataset("cifar-10", tmp_path)
    header = bytearray(tarfile.TarInfo("data_batch_1.bin").tobuf())
    header[124:136] = (2**96 - 2**10).to_bytes(12, "big")  # a size of −1,024
    header[148:156] = b"%06o\0 " % tarfile.calc_chksums(header)[0]  # type: ignore[attr-defined]
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(ValueError, match=r"cannot read .*cifar-10-binary.tar.gz \(damaged at byte 0\)"):
        load_dataset("cifar-10", tmp_path)
    (tmp_path / "train" / "cats").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(tmp_path / "train" / "cats" / "0.png")
    with pytest.raises(ValueError, match="has other folders than train/CLASS and test/CLASS of airplane, "):
        load_dataset("cifar-10", tmp_path)
