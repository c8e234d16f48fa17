"""Generated images: a pure function of seed and id, compared with a plain reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from trainer.data import SyntheticImages, load_dataset
from weightserver.core.splitmix import splitmix64

BILLION = 10**9


def images_of(ids: list[int], **changes: Any) -> Tensor:
    return SyntheticImages(**{"num_images": BILLION, "image_size": 12} | changes)[torch.tensor(ids, dtype=torch.int64)]


@pytest.mark.parametrize(
    ("image_id", "side", "seed"),
    [(123_456_789, 8, 7), (0, 28, 0), (BILLION - 1, 5, 2**64 - 1), (62, 32, 1)],
)
def test_an_image_is_a_coarse_pattern_and_noise(image_id: int, side: int, seed: int) -> None:
    """All measurements on generated images use the same images."""
    num_patches = 3 * 8 * 8
    num_words = -(-(num_patches + 3 * side * side) // 8)
    words = splitmix64(seed, np.arange(image_id * num_words, (image_id + 1) * num_words, dtype=np.uint64))
    random_bytes = b"".join(int(word).to_bytes(8, "little") for word in words)
    image = images_of([image_id], image_size=side, seed=seed)[0]
    assert (image.dtype, image.shape) == (torch.uint8, (3, side, side))
    for (channel, row, column), pixel in np.ndenumerate(image.numpy()):
        patch = random_bytes[64 * channel + 8 * (row * 8 // side) + column * 8 // side]
        noise = random_bytes[num_patches + side * (side * channel + row) + column]
        assert pixel == patch - patch // 4 + noise // 4


def test_many_images_are_the_images_one_by_one() -> None:
    """Enough of them for several chunks."""
    ids = torch.randperm(3_000, generator=torch.Generator().manual_seed(0)) + 2**29
    images = SyntheticImages(num_images=BILLION, image_size=12)
    together = images[ids]
    assert all(torch.equal(images[ids[i : i + 1]][0], together[i]) for i in range(len(ids)))
    assert images[ids[:0]].shape == (0, 3, 12, 12)


def test_it_stands_in_for_a_tensor_of_images() -> None:
    images = SyntheticImages(num_images=100, image_size=12, seed=5)
    tensor = images[:]
    assert len(images) == len(tensor) == 100
    assert torch.equal(images[10:20], tensor[10:20])
    assert torch.equal(images[90:1000], tensor[90:1000])
    ids = torch.tensor([5, 3, 3, 99])
    moved = images.to(torch.device("cpu"))
    assert (len(moved), moved.seed) == (100, 5)
    assert torch.equal(moved[ids], tensor[ids])


def test_they_are_made_on_the_device_they_were_moved_to() -> None:
    images = SyntheticImages(num_images=100, image_size=12).to(torch.device("meta"))
    assert images[torch.tensor([5, 3])].device.type == "meta"


def test_a_billion_images_take_no_memory() -> None:
    images_of([0])
    before = psutil.Process().memory_info().rss
    dataset = load_dataset("synthetic", num_images=BILLION, image_size=32, seed=3)
    assert len(dataset.train_images) == BILLION
    batch = dataset.train_images[torch.arange(BILLION - 512, BILLION)]
    assert psutil.Process().memory_info().rss - before < 32e6  # a bit an image would be 125 MB
    assert batch.shape == (512, 3, 32, 32)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("synthetic", {}, "needs a number of images: give --num-images"),
        ("synthetic", {"num_images": 0}, r"num_images must lie in 1\.\.1,000,000,000, got 0"),
        ("synthetic", {"num_images": BILLION + 1}, r"num_images must lie in 1\.\.1,000,000,000, got 1000000001"),
        ("synthetic", {"num_images": 5, "image_size": 0}, r"image_size must lie in 1\.\.1024, got 0"),
        ("synthetic", {"num_images": 5, "directory": Path("/data")}, "is generated: omit --data-dir /data"),
        ("packed", {"num_images": 5, "directory": Path("/data")}, "'packed' is used whole: omit --num-images"),
        ("imagenet", {"num_images": 5}, "choose one of cifar-10, fashion-mnist, folder, idx, packed, syn"),
    ],
)
def test_bad_arguments(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_dataset(name, **options)
    assert "\n" not in str(caught.value)
