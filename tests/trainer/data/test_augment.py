"""Augmentation: against a plain reference, per sample, and independent of the batch."""

import dataclasses
import importlib
import itertools
import math
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.image_tree import encoded
from trainer.data.augment import Augmentation, AugmentationConfig, _Column
from trainer.data.decode import Crop, decode
from trainer.data.pixels import normalise
from trainer.schedule import visit_uniforms
from trainer.torchvision_schemas import import_module

PAPER = AugmentationConfig()
EVERYTHING = AugmentationConfig(jitter_probability=1, grey_probability=0.5, blur_probability=1)


def images(batch_size: int, channels: int, height: int = 28, width: int = 28) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (batch_size, channels, height, width), generator=generator, dtype=torch.uint8)


def uniforms(batch_size: int) -> Tensor:
    return torch.rand(batch_size, Augmentation.num_uniforms, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("config", [PAPER, EVERYTHING, AugmentationConfig(strong=False)])
def test_a_view_does_not_depend_on_its_batch(config: AugmentationConfig, channels: int) -> None:
    augment, batch, numbers = Augmentation(config, 28), images(16, channels), uniforms(16)
    views = augment(batch, numbers)
    assert views.shape == (16, channels, 28, 28)
    assert views.dtype == torch.float32
    assert views.abs().max() <= 1 + 1e-6
    for i in range(16):
        torch.testing.assert_close(augment(batch[i : i + 1], numbers[i : i + 1]), views[i : i + 1], rtol=0, atol=1e-6)
    order = torch.randperm(16)
    torch.testing.assert_close(augment(batch[order], numbers[order]), views[order], rtol=0, atol=1e-6)


def test_whole_crop_without_flip_is_the_image() -> None:
    augment = Augmentation(AugmentationConfig(strong=False, min_scale=1), 28)
    numbers = torch.full((4, augment.num_uniforms), 0.5)  # square, unflipped
    torch.testing.assert_close(augment(images(4, 1), numbers), normalise(images(4, 1)), rtol=0, atol=1e-5)
    numbers[:, _Column.FLIP] = 0
    torch.testing.assert_close(augment(images(4, 1), numbers), normalise(images(4, 1)).flip(-1), rtol=0, atol=1e-5)


def test_a_view_is_the_same_from_memory_and_from_a_file() -> None:
    """For enlarged crops, which antialiasing does not change, up to Pillow's rounding."""
    augment, numbers = Augmentation(AugmentationConfig(strong=False), 64), uniforms(20)
    batch = images(20, 3, height=30, width=44)
    files = [encoded(Image.fromarray(one.permute(1, 2, 0).numpy()), "PNG") for one in batch]
    crops = [
        decode(content, [Crop(64, crop)])[0]
        for content, crop in zip(files, augment.crops(numbers.numpy()), strict=True)
    ]
    views = augment.finish(torch.from_numpy(np.stack(crops)), numbers)
    torch.testing.assert_close(views, augment(batch, numbers), rtol=0, atol=2 / 127.5)


STRONGEST = AugmentationConfig(jitter_probability=1, grey_probability=0, blur_probability=0)


def in_order(pixels: Tensor, order: Sequence[int], factors: Sequence[float]) -> Tensor:
    """torchvision's functions, in the order of its ColorJitter."""
    functional = import_module("torchvision.transforms.functional")
    parts = [
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    ]
    for part in order:
        pixels = parts[part](pixels, factors[part])
    return pixels


@pytest.mark.parametrize("channels", [1, 3])
def test_each_order_of_the_jitter_is_torchvisions(channels: int) -> None:
    """Within one grey level, for all 24 orders, with factors that often cut."""
    orders = list(itertools.permutations(range(4)))
    batch, numbers = images(10 * len(orders), channels), uniforms(10 * len(orders))
    batch[::2] = batch[::2] // 64 * 85  # black, white, greys, and channels that are equal
    numbers[:, _Column.ORDER] = (torch.arange(len(batch)) // 2 % 24 + 0.5) / 24
    views = (Augmentation(STRONGEST, 28).finish(batch, numbers) + 1) / 2
    strengths = torch.tensor([0.8, 0.8, 0.8, 0.2])
    factors = strengths * (2 * numbers[:, _Column.BRIGHTNESS : _Column.HUE + 1] - 1) + torch.tensor([1.0, 1, 1, 0])
    differences = torch.tensor(
        [
            [
                (view - in_order(image, order, own)).abs().max()
                for order in (orders[number // 2 % 24], orders[23 - number // 2 % 24])
            ]
            for number, (view, image, own) in enumerate(zip(views, batch.float() / 255, factors.tolist(), strict=True))
        ]
    )
    assert differences[:, 0].max() < 1 / 255
    reverse = (differences[:, 1] > 5 / 255).float().mean()  # most grey images do not show it while nothing is cut
    assert reverse > {1: 0.1, 3: 0.5}[channels]


def test_orders_are_uniform_and_parts_without_strength_do_nothing() -> None:
    numbers = torch.from_numpy(visit_uniforms(0, np.arange(24_000), Augmentation.num_uniforms))
    counts = torch.bincount((numbers[:, _Column.ORDER].double() * 24).long(), minlength=24)
    assert ((counts - 1_000).float() ** 2 / 1_000).sum() < 60  # chi-square of 23 degrees of freedom: 49.7 at 0.001
    still = dataclasses.replace(STRONGEST, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0)
    batch = images(48, 3)
    torch.testing.assert_close(Augmentation(still, 28).finish(batch, numbers[:48]), normalise(batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", [28, 224])
def test_the_blur_is_torchvisions(side: int) -> None:
    """With SimCLR's kernel, a tenth of the side (3 and 23 pixels), within a hundredth of a grey level."""
    config = AugmentationConfig(jitter_probability=0, grey_probability=0, blur_probability=0.6)
    batch, numbers = images(8, 3, side, side), uniforms(8)
    numbers[:, _Column.BLUR] = torch.arange(8) / 8
    views = (Augmentation(config, side).finish(batch, numbers) + 1) / 2
    blur = import_module("torchvision.transforms.functional").gaussian_blur
    kernel = {28: 3, 224: 23}[side]
    for number, (view, image) in enumerate(zip(views, batch.float() / 255, strict=True)):
        sigma = 0.1 + 1.9 * float(numbers[number, _Column.BLUR_SIGMA])
        expected = blur(image, [kernel, kernel], [sigma, sigma]) if number / 8 < 0.6 else image
        torch.testing.assert_close(view, expected, rtol=0, atol=0.01 / 255)


@pytest.mark.guard
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch.compile's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_whole_augmentation_compiles(channels: int) -> None:
    """It compiles to one graph of few kernels, with the views of eager execution.

    In the scale -1..1 they differ by rounding alone, a few 2⁻²⁴. A crop's coordinates are rounded too, to a few 2⁻²⁴
    of the side; a pixel's value changes by as much of a pixel's distance, at most, in each direction.
    """
    metrics = importlib.import_module("torch._inductor.metrics")
    side = 32
    batch, numbers = images(16, channels, side, side), uniforms(16)
    eager, compiled = Augmentation(PAPER, side), Augmentation(PAPER, side, compiled=True)
    with Launches() as launches:
        expected = eager.finish(batch, numbers)
    metrics.reset()
    torch.testing.assert_close(compiled.finish(batch, numbers), expected, rtol=0, atol=2e-6)
    assert metrics.generated_kernel_count <= {1: 6, 3: 27}[channels] < launches.count / 3
    if channels == 3:  # whatever the channels, a crop is the same
        weak = [Augmentation(dataclasses.replace(PAPER, strong=False), side, compiled=way) for way in (False, True)]
        torch.testing.assert_close(*(augment(batch, numbers) for augment in weak), rtol=0, atol=2 * 8 * side * 2**-24)


class Launches(TorchDispatchMode):
    """Counts operations that compute something: each is a launch on a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def test_probabilities_select_samples() -> None:
    config = AugmentationConfig(min_scale=1, max_aspect_ratio=1, flip_probability=0.3, jitter_probability=0)
    augment = Augmentation(config, 28)
    numbers = uniforms(400)
    numbers[:, _Column.BLUR] = 1 - 1e-6
    batch = images(400, 1)
    flipped = (augment(batch, numbers) - normalise(batch).flip(-1)).abs().amax(dim=(1, 2, 3)) < 1e-4
    assert torch.equal(flipped, numbers[:, _Column.FLIP] < 0.3)


def test_grey_makes_channels_equal() -> None:
    config = AugmentationConfig(grey_probability=1, blur_probability=0)
    views = Augmentation(config, 28)(images(4, 3), uniforms(4))
    torch.testing.assert_close(views, views.mean(dim=1, keepdim=True).expand_as(views), rtol=0, atol=1e-6)


def test_views_of_a_single_pixel() -> None:
    views = Augmentation(AugmentationConfig(blur_probability=1), 1)(images(4, 3), uniforms(4))
    assert views.shape == (4, 3, 1, 1)
    assert views.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_scale": 0.0}, "min_scale is 0.0 and the largest 1.0: give 0 < smallest <= largest <= 1"),
        ({"max_scale": 1.5}, "min_scale is 0.2 and the largest 1.5"),
        ({"max_aspect_ratio": 0.5}, "max_aspect_ratio is 0.5"),
        ({"max_aspect_ratio": math.inf}, "max_aspect_ratio is inf"),
        ({"blur_probability": 1.5}, "blur_probability is 1.5"),
        ({"brightness": -1.0}, "brightness is -1.0"),
        ({"contrast": math.nan}, "contrast is nan"),
        ({"blur_sigma": (1.0, math.inf)}, "blur_sigma is"),
        ({"hue": 0.7}, "hue is 0.7"),
        ({"hue": math.nan}, "hue is nan"),
        ({"blur_sigma": (2.0, 1.0)}, "blur_sigma is"),
    ],
)
def test_impossible_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation(AugmentationConfig(**options), 28)  # type: ignore[arg-type]
