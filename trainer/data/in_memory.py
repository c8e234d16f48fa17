"""Labelled data sets that are read into memory: Fashion-MNIST and others in idx files, and CIFAR-10.

An idx file is a big-endian header (two zero bytes, a type code, the number of axes, each axis's length as uint32)
followed by the values in row-major order. Source: http://yann.lecun.com/exdb/mnist/.
"""

import gzip
import hashlib
import os
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.error import URLError

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.cifar import CLASSES as CIFAR_CLASSES
from trainer.data.cifar import read_cifar
from trainer.data.dataset import Dataset
from trainer.torchvision_schemas import import_module
from weightserver.common.atomic_files import LOCK, locked
from weightserver.common.logs import Remark, say

SYSTEM_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
CACHE_DIRECTORY = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pic-weightserver")
DEBIAN_PACKAGE = "dataset-fashion-mnist"
CONNECT_TIMEOUT_SECONDS = 10.0
_DIGESTED_IMAGES = 1_000
"""Number of images, evenly spread, that the digest of a data set covers."""
_UINT8 = 0x08

# File, number of axes, MD5 of the decompressed Fashion-MNIST file (independent of its compression).
_FILES = {
    "train-images-idx3-ubyte": (3, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    "train-labels-idx1-ubyte": (1, "9018921c3c673c538a1fc5bad174d6f9"),
    "t10k-images-idx3-ubyte": (3, "8181f5470baa50b63fa0f6fddb340f0a"),
    "t10k-labels-idx1-ubyte": (1, "15d484375f8d13e6eb1aabb0c3f46965"),
}
_FASHION = ("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def _load_idx(directory: Path | None) -> Dataset:
    if directory is None:
        raise ValueError("data set 'idx' needs a folder: give --data-dir with the four idx files")
    return _read_directory(directory, verify=False)


def _load_fashion_mnist(directory: Path | None) -> Dataset:
    if directory is not None:
        return _read_directory(directory, verify=True)
    if all(_find_idx(SYSTEM_DIRECTORY, name) for name in _FILES):
        return _read_directory(SYSTEM_DIRECTORY, verify=True)
    downloaded = CACHE_DIRECTORY / "FashionMNIST" / "raw"
    try:
        with _no_other_download():
            if not all(_find_idx(downloaded, name) for name in _FILES):
                _download("FashionMNIST", "Fashion-MNIST")
    except (OSError, RuntimeError, URLError) as error:
        raise ValueError(
            f"fashion-mnist not found: no copy in {SYSTEM_DIRECTORY}; download failed ({_one_line(error)}). Install "
            f"the Debian package {DEBIAN_PACKAGE}, or put the four .gz files of "
            "github.com/zalandoresearch/fashion-mnist into a folder and give it as --data-dir"
        ) from error
    return _read_directory(downloaded, verify=True)


def _read_directory(directory: Path, *, verify: bool) -> Dataset:
    if not directory.is_dir():
        raise ValueError(f"no such folder: {directory}: give the folder that holds {', '.join(_FILES)} (or .gz)")
    arrays: dict[str, Tensor] = {}
    for name, (num_axes, md5) in _FILES.items():
        path = _find_idx(directory, name)
        if path is None:
            raise ValueError(f"{directory} holds neither {name}.gz nor {name}: put the four idx files there")
        arrays[name] = torch.from_numpy(_read_idx(path, num_axes, md5 if verify else None).copy())
    train_images, train_labels, test_images, test_labels = arrays.values()
    for images, labels, kind in ((train_images, train_labels, "training"), (test_images, test_labels, "test")):
        if len(images) != len(labels) or len(images) == 0:
            raise ValueError(
                f"{directory} has {len(images)} {kind} images but {len(labels)} labels: restore the original files"
            )
    names = _FASHION if verify else ()
    return _in_memory(train_images[:, None], train_labels.long(), test_images[:, None], test_labels.long(), names)


def _find_idx(directory: Path, name: str) -> Path | None:
    return next((path for path in (directory / f"{name}.gz", directory / name) if path.is_file()), None)


def _read_idx(path: Path, num_axes: int, md5: str | None) -> NDArray[np.uint8]:
    """The array of an idx file, plain or gzipped. `md5`, if given, is that of the decompressed file."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path} ({error}): delete it and fetch it again") from error
    header = 4 + 4 * num_axes
    if len(content) < header or content[:4] != bytes((0, 0, _UINT8, num_axes)):
        raise ValueError(f"{path} is not an idx file of uint8 with {num_axes} axes: give the original file")
    shape = tuple(int(length) for length in np.frombuffer(content, ">u4", count=num_axes, offset=4))
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise ValueError(f"{path} has {len(content)} bytes, {expected} expected: delete it and fetch it again")
    if md5 is not None and (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise ValueError(f"{path} has checksum {found}, {md5} expected: delete it and fetch it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _load_cifar(directory: Path | None) -> Dataset:
    if directory is not None:
        return _in_memory(*read_cifar(directory), CIFAR_CLASSES)
    try:
        with _no_other_download():
            _download("CIFAR10", "CIFAR-10")
    except (OSError, RuntimeError, URLError) as error:
        raise ValueError(
            f"cifar-10 not found: download failed ({_one_line(error)}). Put torchvision's cifar-10-batches-py or the "
            "binary version of www.cs.toronto.edu/~kriz/cifar.html into a folder and give it as --data-dir"
        ) from error
    return _in_memory(*read_cifar(CACHE_DIRECTORY), CIFAR_CLASSES)


def _in_memory(
    train_images: Tensor, train_labels: Tensor, test_images: Tensor, test_labels: Tensor, class_names: tuple[str, ...]
) -> Dataset:
    return Dataset(
        class_names=class_names,
        digests=_digests_of(train_images),
        test_digests=_digests_of(test_images),
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
    )


def _digests_of(images: Tensor) -> tuple[str]:
    some = images[:: -(-len(images) // _DIGESTED_IMAGES)]
    return (hashlib.sha256(some.numpy().tobytes()).hexdigest(),)


@contextmanager
def _no_other_download() -> Iterator[None]:
    """Waits for another rank or command that downloads: torchvision's downloads write to the same files."""
    with ExitStack() as stack:
        with suppress(OSError):  # nowhere to write: the download says so, if there has to be one
            CACHE_DIRECTORY.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(CACHE_DIRECTORY / LOCK))
        yield


def _download(name: str, title: str) -> None:
    """Downloads a data set by torchvision, which verifies each archive and keeps what it has; fails fast without a
    network."""
    say(Remark(f"downloading {title} into {CACHE_DIRECTORY}", directory=str(CACHE_DIRECTORY)))
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_TIMEOUT_SECONDS)
    try:
        getattr(import_module("torchvision.datasets"), name)(CACHE_DIRECTORY, download=True)
    finally:
        socket.setdefaulttimeout(before)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


DATASETS: dict[str, Callable[[Path | None], Dataset]] = {
    "fashion-mnist": _load_fashion_mnist,
    "cifar-10": _load_cifar,
    "idx": _load_idx,
}
