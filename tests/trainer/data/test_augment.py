"""Augmentation: against a plain reference, per sample, and independent of the batch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tests.helpers.image_tree import encoded
from trainer.data.augment import Augmentation, AugmentationConfig, _Column, normalise
from trainer.data.decode import Crop, decode

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


def test_the_same_numbers_give_the_same_view_and_others_another() -> None:
    augment, batch = Augmentation(PAPER, 28), images(8, 1)
    assert torch.equal(augment(batch, uniforms(8)), augment(batch, uniforms(8)))
    assert not torch.allclose(augment(batch, uniforms(8)), augment(batch, uniforms(8).flip(0)))


def test_whole_crop_without_flip_is_the_image() -> None:
    augment = Augmentation(AugmentationConfig(strong=False, min_scale=1), 28)
    numbers = torch.full((4, augment.num_uniforms), 0.5)  # square, unflipped
    torch.testing.assert_close(augment(images(4, 1), numbers), normalise(images(4, 1)), rtol=0, atol=1e-5)
    numbers[:, _Column.FLIP] = 0
    torch.testing.assert_close(augment(images(4, 1), numbers), normalise(images(4, 1)).flip(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("left", "top"), [(0.0, 0.0), (1 - 1e-7, 0.0), (0.5, 1 - 1e-7)])
def test_crop_against_slicing_and_interpolate(left: float, top: float) -> None:
    """A crop of a quarter of the area is a slice of half the side, resized; borders apart, where slicing sees less."""
    augment = Augmentation(AugmentationConfig(strong=False, min_scale=0.25), 28)
    numbers = torch.full((1, augment.num_uniforms), 0.5)
    numbers[:, _Column.AREA], numbers[:, _Column.LEFT], numbers[:, _Column.TOP] = 0, left, top
    x, y = round(14 * left), round(14 * top)
    expected = F.interpolate(normalise(images(1, 1))[:, :, y : y + 14, x : x + 14], 28, mode="bilinear")
    torch.testing.assert_close(
        augment(images(1, 1), numbers)[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1], rtol=0, atol=1e-4
    )


def test_crop_sides_have_the_stated_area_and_ratio() -> None:
    """On an image whose pixels are their own coordinates, a crop's extent can be read off."""
    side = 64
    ramp = torch.arange(side, dtype=torch.uint8)
    column_image = ramp[None, :].expand(side, side)[None, None].expand(500, 1, side, side)
    row_image = column_image.transpose(-1, -2)
    config = AugmentationConfig(strong=False, min_scale=0.1, max_scale=0.6)
    augment, numbers = Augmentation(config, side), uniforms(500)
    numbers[:, _Column.FLIP] = 1 - 1e-6

    def extent(coordinates: Tensor) -> Tensor:
        values = (augment(coordinates, numbers) + 1) * 127.5
        spread = values.amax(dim=(1, 2, 3)) - values.amin(dim=(1, 2, 3))
        return spread * side / (side - 1)  # between the centres of the first and last pixels

    width, height = extent(column_image), extent(row_image)
    inside = (width < 0.9 * side) & (height < 0.9 * side)  # not clamped to the image
    area, ratio = (width * height / side**2)[inside], (width / height)[inside]
    expected = config.min_scale + (config.max_scale - config.min_scale) * numbers[inside, _Column.AREA]
    torch.testing.assert_close(area, expected, rtol=0.05, atol=0)
    assert ratio.max() <= 4 / 3 * 1.05
    assert ratio.min() >= 3 / 4 / 1.05
    assert abs(ratio.log().mean()) < 0.05


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (224, 224), (900, 100)])
def test_boxes_have_the_stated_area_and_ratio(size: tuple[int, int]) -> None:
    """And lie within the image, and reach each of its edges, whatever its shape."""
    width, height = size
    numbers = uniforms(2_000)
    boxes = [Augmentation(PAPER, 224).box(row, width, height) for row in numbers.numpy()]
    left, top, right, bottom = np.array([box[:4] for box in boxes]).T
    ratio = (right - left) / (bottom - top)
    assert ratio.min() > 3 / 4 - 1e-5
    assert ratio.max() < 4 / 3 + 1e-5
    assert min(left.min(), top.min()) >= 0
    assert right.max() <= width
    assert bottom.max() <= height
    assert max(left.min(), top.min(), width - right.max(), height - bottom.max()) < 1
    whole = (right - left < 0.999 * width) & (bottom - top < 0.999 * height)  # not cut
    drawn = 0.2 + 0.8 * numbers[:, _Column.AREA].numpy()
    np.testing.assert_allclose(((right - left) * (bottom - top) / (width * height))[whole], drawn[whole], rtol=1e-5)
    if width < 2 * height:  # in a wider one most of the areas drawn have no room
        assert ratio.min() < 0.77
        assert ratio.max() > 1.3
        assert whole.mean() > 0.6
    assert [box.flipped for box in boxes] == (numbers[:, _Column.FLIP] < 0.5).tolist()


def test_a_view_is_the_same_from_memory_and_from_a_file() -> None:
    """Crops that are enlarged: there antialiasing makes no difference, but for Pillow's rounding."""
    augment, numbers = Augmentation(AugmentationConfig(strong=False), 64), uniforms(20)
    batch = images(20, 3, height=30, width=44)
    files = [encoded(Image.fromarray(one.permute(1, 2, 0).numpy()), "PNG") for one in batch]
    crops = [
        decode(content, [Crop(64, lambda *size, row=row: augment.box(row, *size))])[0]
        for content, row in zip(files, numbers.numpy(), strict=True)
    ]
    views = augment.finish(torch.from_numpy(np.stack(crops)), numbers)
    torch.testing.assert_close(views, augment(batch, numbers), rtol=0, atol=2 / 127.5)


def test_jitter_is_per_sample_and_follows_the_definitions() -> None:
    config = AugmentationConfig(
        min_scale=1, flip_probability=0, jitter_probability=1, brightness=0.4, contrast=0.4, blur_probability=0
    )
    augment = Augmentation(config, 28)
    numbers = torch.full((2, augment.num_uniforms), 0.5)
    numbers[0, _Column.BRIGHTNESS], numbers[1, _Column.CONTRAST] = 0.0, 0.0  # factors 0.6
    batch = images(2, 1) // 2 + 60  # nothing is clipped
    pixels = batch.float() / 255
    mean = pixels[1].mean()
    expected = torch.stack([0.6 * pixels[0], mean + 0.6 * (pixels[1] - mean)]) * 2 - 1
    torch.testing.assert_close(augment(batch, numbers), expected, rtol=0, atol=1e-5)


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


def test_images_of_another_size_and_shape_are_resized() -> None:
    views = Augmentation(PAPER, 32)(images(4, 3, height=40, width=60), uniforms(4))
    assert views.shape == (4, 3, 32, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_scale": 0.0}, "min_scale and max_scale are 0.0 and 1.0"),
        ({"max_scale": 1.5}, "min_scale and max_scale are 0.2 and 1.5"),
        ({"max_aspect_ratio": 0.5}, "max_aspect_ratio is 0.5"),
        ({"blur_probability": 1.5}, "blur_probability is 1.5"),
        ({"brightness": -1.0}, "brightness is -1.0"),
        ({"hue": 0.7}, "hue is 0.7"),
        ({"hue": math.nan}, "hue is nan"),
        ({"blur_sigma": (2.0, 1.0)}, "blur_sigma is"),
    ],
)
def test_impossible_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AugmentationConfig(**options)  # type: ignore[arg-type]
