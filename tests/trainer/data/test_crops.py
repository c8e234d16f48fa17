"""Random resized crops: their distribution is torchvision's, and the same on every processor."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import ks_2samp

from trainer.data.crops import NUM_TRIES, RandomCrops, draw_crops
from trainer.torchvision_schemas import import_module

SIZES = [(500, 375), (375, 500), (224, 224), (28, 28), (1000, 100)]
SCALES = [(0.2, 1.0), (0.08, 1.0), (0.05, 0.14)]
RATIO = 4 / 3


def crops(count: int, scale: tuple[float, float], max_ratio: float = RATIO) -> RandomCrops:
    numbers = np.random.default_rng(0).integers(2**24, size=(count, 2 * NUM_TRIES + 3)).astype(np.float32) / np.float32(
        2**24
    )
    areas, ratios, (left, top, flip) = numbers[:, :NUM_TRIES], numbers[:, NUM_TRIES:-3], numbers[:, -3:].T
    return draw_crops(areas, ratios, left, top, flip < 0.5, scale=scale, max_ratio=max_ratio)


def described(boxes: NDArray[np.float64], width: int, height: int) -> dict[str, NDArray[np.float64]]:
    """Area, ratio and position of boxes left, top, right, bottom [n, 4]."""
    left, top, right, bottom = boxes.T
    return {
        "area": (right - left) * (bottom - top) / (width * height),
        "ratio": (right - left) / (bottom - top),
        "left": left / width,
        "top": top / height,
        "right": right / width,
        "bottom": bottom / height,
    }


@pytest.mark.guard
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", SIZES)
def test_the_distribution_is_torchvisions(size: tuple[int, int], scale: tuple[float, float]) -> None:
    """Area, ratio and position by the two-sample Kolmogorov–Smirnov test, of 8,000 crops and torchvision's 1,000."""
    width, height = size
    torch.manual_seed(0)
    draw = import_module("torchvision.transforms").RandomResizedCrop.get_params
    image = torch.empty(1, height, width)
    theirs = np.array([draw(image, list(scale), [1 / RATIO, RATIO]) for _ in range(1_000)], np.float64)
    top, left, crop_height, crop_width = theirs.T
    expected = described(np.stack([left, top, left + crop_width, top + crop_height], axis=1), width, height)
    boxes = crops(8_000, scale).boxes(width, height)[:, :4].astype(np.float64)
    assert (boxes >= 0).all()
    assert (boxes[:, 2] <= width).all()
    assert (boxes[:, 3] <= height).all()
    for name, found in described(boxes, width, height).items():
        assert ks_2samp(found, expected[name]).pvalue > 1e-4, name


def test_a_small_image_has_a_crop_too() -> None:
    for width, height in ((1, 1), (2, 1), (1, 50), (3, 3)):
        for left, top, right, bottom, _ in crops(200, (0.05, 0.14)).boxes(width, height):
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height


@pytest.mark.parametrize("size", SIZES)
def test_a_crop_alone_is_the_one_among_others(size: tuple[int, int]) -> None:
    drawn = crops(100, (0.2, 1.0))
    assert [drawn.box(place, *size) for place in range(100)] == [tuple(box) for box in drawn.boxes(*size).tolist()]


def test_sides_are_those_of_exact_arithmetic() -> None:
    """Compares the shapes with forty digits: the rounding to whole pixels is never ambiguous."""
    width, height, max_ratio = 500, 375, 7.5
    rounded = []
    with localcontext(prec=40):
        numbers = np.random.default_rng(0).integers(2**24, size=(300, 2)).astype(np.float32) / 2**24
        for area, ratio in numbers:
            pixels = (Decimal("0.25") + Decimal("0.75") * Decimal(float(area))) * width * height
            shape = ((2 * Decimal(float(ratio)) - 1) * Decimal(max_ratio).ln()).exp()
            rounded.append([round((pixels * shape).sqrt()), round((pixels / shape).sqrt())])
        areas, ratios = (np.repeat(column[:, None], NUM_TRIES, axis=1) for column in numbers.T)
    middle = np.full(300, 0.5, np.float32)
    found = draw_crops(areas, ratios, middle, middle, middle < 0, scale=(0.25, 1.0), max_ratio=max_ratio)
    compared = 0
    boxes = found.boxes(width, height)
    for (left, top, right, bottom, _), (crop_width, crop_height) in zip(boxes, rounded, strict=True):
        if crop_width <= width and crop_height <= height:
            assert (right - left, bottom - top) == (crop_width, crop_height)
            compared += 1
    assert compared > 50


def digest() -> str:
    boxes = [
        drawn.box(place, *size)
        for scale in SCALES
        for drawn in [crops(1_000, scale)]
        for place in range(1_000)
        for size in SIZES
    ]
    return hashlib.sha256(np.array(boxes, "<i4").tobytes()).hexdigest()


def test_crops_never_change() -> None:
    """A resumed run sees the same crops on any processor and in any later version."""
    assert digest() == "3e8d6fc9394dd53f29d8221a24bfdc40da9911f20d93eda0b565b0387219bfdd"


@pytest.mark.guard
def test_crops_do_not_depend_on_numpys_kernels() -> None:
    """Disables the instructions that NumPy chooses by the processor, as on an older one."""
    features = np.show_config("dicts")["SIMD Extensions"].get("found", [])
    program = "import tests.trainer.data.test_crops as crops; print(crops.digest())"
    environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(features)}
    plain = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert plain.stdout.strip() == digest()
