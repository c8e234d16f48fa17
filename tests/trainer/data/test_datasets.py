"""Data sets: real files if available, generated ones for every kind of damage."""

import gzip
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data import in_memory, load_dataset

ROOT = Path(__file__).parents[3]
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


LABELS = idx_bytes(np.zeros(29, np.uint8))


@pytest.fixture
def idx_directory(tmp_path: Path) -> Path:
    """Four small idx files, two of them gzipped."""
    random = np.random.default_rng(0)
    for name, shape in zip(NAMES, ((30, 28, 28), (30,), (20, 28, 28), (20,)), strict=True):
        content = idx_bytes(random.integers(0, 10, shape, dtype=np.uint8))
        if "images" in name:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (tmp_path / name).write_bytes(content)
    return tmp_path


def test_idx_files_are_read_plain_and_gzipped(idx_directory: Path) -> None:
    dataset = load_dataset("idx", idx_directory)
    assert isinstance(dataset.train_images, Tensor)
    assert isinstance(dataset.test_images, Tensor)
    random = np.random.default_rng(0)
    assert np.array_equal(dataset.train_images[:, 0].numpy(), random.integers(0, 10, (30, 28, 28), dtype=np.uint8))
    assert np.array_equal(dataset.train_labels.numpy(), random.integers(0, 10, (30,), dtype=np.uint8))
    assert dataset.test_images.shape == (20, 1, 28, 28)
    assert dataset.test_images.dtype == torch.uint8
    assert dataset.test_labels.dtype == torch.int64


def test_a_part_is_trained_on_and_all_images_are_evaluated(idx_directory: Path) -> None:
    whole, part = load_dataset("idx", idx_directory), load_dataset("idx", idx_directory, num_images=7)
    assert torch.equal(part.train_images[:], whole.train_images[:7])
    assert torch.equal(part.evaluated.train_images[:], whole.train_images[:])
    assert torch.equal(part.evaluated.train_labels, whole.train_labels)
    assert torch.equal(whole.evaluated.train_images[:], whole.train_images[:])


@pytest.mark.skipif(not in_memory.SYSTEM_DIRECTORY.is_dir(), reason="no system copy of Fashion-MNIST")
def test_the_system_copy_of_fashion_mnist() -> None:
    dataset = load_dataset("fashion-mnist")
    assert dataset.train_images.shape == (60_000, 1, 28, 28)
    assert torch.bincount(dataset.train_labels).tolist() == [6_000] * 10
    assert torch.bincount(dataset.test_labels).tolist() == [1_000] * 10


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (f"{NAMES[0]}.gz", lambda content: content[:-500], "cannot read .*train-images.*fetch it again"),
        (NAMES[1], lambda content: content[:-1], "has 37 bytes, 38 expected"),
        (f"{NAMES[0]}.gz", lambda content: content[:5_000] + bytes(9) + content[5_009:], "cannot read .*train-images"),
        (f"{NAMES[0]}.gz", lambda _: gzip.compress(LABELS), "not an idx file of uint8 with 3 axes"),
        (NAMES[3], None, "holds neither t10k-labels-idx1-ubyte.gz nor t10k-labels-idx1-ubyte"),
        (NAMES[1], lambda _: LABELS, "has 30 training images but 29 labels"),
    ],
)
def test_damaged_files_give_one_clear_line(idx_directory: Path, name: str, damage: Any, message: str) -> None:
    path = idx_directory / name
    content = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
    with pytest.raises(ValueError, match=message) as caught:
        load_dataset("idx", idx_directory)
    assert "\n" not in str(caught.value)


def test_fashion_mnist_must_have_its_checksum(idx_directory: Path) -> None:
    with pytest.raises(ValueError, match=r"has checksum .*, f4a8712d7a061bf5bd6d2ca38dc4d50a expected"):
        load_dataset("fashion-mnist", idx_directory)


@pytest.mark.parametrize(
    ("name", "directory", "message"),
    [
        ("imagenet", None, "unknown data set 'imagenet': choose one of cifar-10, fashion-mnist, folder, idx"),
        ("fashion-mnist", Path("/no/such/folder"), "no such folder: /no/such/folder"),
        ("idx", None, "needs a folder"),
    ],
)
def test_bad_arguments(name: str, directory: Path | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset(name, directory)


class TestWithoutASystemCopy:
    """The places that are tried after the system's copy, with the network replaced."""

    @pytest.fixture(autouse=True)
    def _nothing_at_hand(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(in_memory, "SYSTEM_DIRECTORY", tmp_path / "system")
        monkeypatch.setattr(in_memory, "CACHE_DIRECTORY", tmp_path / "cache")

    def test_one_line_says_all_that_was_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_network(*_: object) -> None:
            raise URLError("Name or service not known")

        monkeypatch.setattr(in_memory, "_download", no_network)
        with pytest.raises(ValueError, match="fashion-mnist not found") as caught:
            load_dataset("fashion-mnist")
        message = str(caught.value)
        assert "\n" not in message
        for part in ("no copy in", "download failed (", "Debian package dataset-fashion-mnist", "--data-dir"):
            assert part in message

    def test_one_of_several_ranks_downloads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The others wait, and read what is complete."""
        raw, downloads = in_memory.CACHE_DIRECTORY / "FashionMNIST" / "raw", list[str]()

        def download(name: str, _: str) -> None:
            downloads.append(name)
            raw.mkdir(parents=True)
            for number, file in enumerate(NAMES):
                (raw / file).touch()
                time.sleep(0.05)
                (raw / file).write_bytes(idx_bytes(np.zeros((2,) if number % 2 else (2, 4, 4), np.uint8)))

        monkeypatch.setattr(in_memory, "_download", download)
        monkeypatch.setattr(in_memory, "_FILES", {name: (1 if "labels" in name else 3, None) for name in NAMES})
        with ThreadPoolExecutor(3) as ranks:
            found = list(ranks.map(lambda _: len(load_dataset("fashion-mnist").train_labels), range(3)))
        assert (found, downloads) == ([2, 2, 2], ["FashionMNIST"])

    def test_a_damaged_download_is_named_and_not_replaced_in_silence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = in_memory.CACHE_DIRECTORY / "FashionMNIST" / "raw"
        raw.mkdir(parents=True)
        for name in NAMES:
            (raw / name).write_bytes(b"half")
        with pytest.raises(ValueError, match="is not an idx file"):
            load_dataset("fashion-mnist")


@pytest.mark.parametrize(("user", "installs"), [(0, True), (1000, False)])
def test_make_installs_the_package_as_root_only(user: int, installs: bool, tmp_path: Path) -> None:
    """If there is neither a system copy nor a download; the environment's Python, apt-get and id are replaced."""
    programs = {
        "venv/bin/python": "exit 1",
        "bin/apt-get": f'echo "$@" >> {tmp_path}/installed',
        "bin/id": f"echo {user}",
    }
    for name, line in programs.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    (tmp_path / "venv" / ".installed").touch()
    variables = [f"VENV={tmp_path}/venv", f"FASHION_MNIST={tmp_path}/absent"]
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    subprocess.run(["make", "-C", ROOT, "fashion-mnist", *variables], env=os.environ | {"PATH": path}, check=True)
    installed = (tmp_path / "installed").read_text() if (tmp_path / "installed").exists() else ""
    assert ("install -y -q --no-install-recommends dataset-fashion-mnist" in installed) == installs
