"""Per-sample augmentation of a batch, on any device, from given uniform numbers.

A view is a pure function of (image, uniforms): no random numbers are drawn here, so a visit looks the same in any
batch, on any rank and after a restart. The parameters of a view (its box, factors, blur) are computed on the host, in
NumPy, and reach the device as one array; there a batch is a fixed sequence of torch operations that never waits for the
host and that torch.compile compiles as a whole.

Images in memory are cropped on the device. Images that are decoded for each visit are cropped and flipped while they
are decoded (`trainer.data.decode`), by the same box, so that only colour and blur remain for the device.

The transforms are torchvision's (as in SimCLR and MoCo v2), with their distributions: RandomResizedCrop,
RandomHorizontalFlip, ColorJitter, RandomGrayscale, GaussianBlur. Two differences are deliberate: on the device crops
are resampled bilinearly without antialiasing, which matters only if a crop is larger than `image_size` (never at 28
px); and resampling uses the pixels around a crop, like resizing the whole image before cropping.
"""

import itertools
from collections.abc import Sequence
from enum import IntEnum, auto
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data.augmentation_config import AugmentationConfig as AugmentationConfig
from trainer.data.crops import NUM_TRIES, RandomCrops, draw_crops
from trainer.data.decode import ChosenBox, centre
from trainer.data.pixels import MINUS_ONE_TO_ONE, PixelScale, normalise
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.torch import to_device


class _Column(IntEnum):
    """The uniforms' columns by purpose; fixed, so that switching one operation off changes no other."""

    AREA = 0
    ASPECT = auto()
    TOP = auto()
    LEFT = auto()
    FLIP = auto()
    JITTER = auto()
    BRIGHTNESS = auto()
    CONTRAST = auto()
    SATURATION = auto()
    HUE = auto()
    GREY = auto()
    BLUR = auto()
    BLUR_SIGMA = auto()
    ORDER = auto()
    """Order of the colour jitter's four parts."""
    FURTHER_AREAS = auto()
    """First column of the crop's further attempts: their areas, then their ratios."""


_FURTHER = NUM_TRIES - 1
_NUM_COLUMNS = _Column.FURTHER_AREAS + 2 * _FURTHER
_AREAS = [_Column.AREA, *range(_Column.FURTHER_AREAS, _Column.FURTHER_AREAS + _FURTHER)]
_RATIOS = [_Column.ASPECT, *range(_Column.FURTHER_AREAS + _FURTHER, _NUM_COLUMNS)]

_LUMA = (0.299, 0.587, 0.114)
"""ITU-R 601-2, by which Pillow converts colour to grey."""
_PLACES = np.array([np.argsort(order) for order in itertools.permutations(range(4))])
"""Places of brightness, contrast, saturation and hue in each order of the colour jitter's parts, int64 [24, 4]."""
_CONTRAST, _SATURATION, _HUE = 1, 2, 3


class Augmentation:
    """Augments uint8 [B, C, H, W] to normalised float32 [B, C, image_size, image_size]; C is 1 or 3.

    `uniforms` are float32 [B, num_uniforms] in [0, 1), one row per image; on the host, so that the program never waits
    for a device. Row i of the result depends only on row i of the arguments. With `compiled`, torch.compile creates one
    program for each batch shape and set of operations, at most eight per process
    (torch._dynamo.config.recompile_limit); views are the same up to rounding. Stateless, hence thread-safe.
    """

    num_uniforms = _NUM_COLUMNS

    def __init__(
        self,
        config: AugmentationConfig,
        image_size: int,
        pixels: PixelScale = MINUS_ONE_TO_ONE,
        *,
        compiled: bool = False,
    ) -> None:
        config.check()
        self.config = config
        self.image_size = image_size
        self.pixels = pixels
        self._views = torch.compile(_views, fullgraph=True, dynamic=False) if compiled else _views

    def __call__(self, images: Tensor, uniforms: Tensor | Float32Array) -> Tensor:
        numbers = _on_host(uniforms)
        height, width = images.shape[-2:]
        boxes = self._drawn(numbers).boxes(width, height)
        return self._render(images, numbers, _in_image(boxes, width, height))

    def finish(self, crops: Tensor, uniforms: Tensor | Float32Array) -> Tensor:
        """Views of images that were already cropped to their boxes: uint8 [B, C, image_size, image_size]."""
        return self._render(crops, _on_host(uniforms))

    def crops(self, uniforms: Float32Array) -> Sequence[ChosenBox]:
        """Crop and flip of each image, of uniforms float32 [B, num_uniforms]; they give a box for an image's size."""
        drawn = self._drawn(uniforms)
        return [partial(drawn.box, place) for place in range(len(uniforms))]

    def _drawn(self, uniforms: Float32Array) -> RandomCrops:
        config = self.config
        return draw_crops(
            uniforms[:, _AREAS],
            uniforms[:, _RATIOS],
            uniforms[:, _Column.LEFT],
            uniforms[:, _Column.TOP],
            uniforms[:, _Column.FLIP] < config.flip_probability,
            scale=(config.min_scale, config.max_scale),
            max_ratio=config.max_aspect_ratio,
        )

    @torch.no_grad()
    def _render(self, images: Tensor, uniforms: Float32Array, boxes: Float32Array | None = None) -> Tensor:
        """Views of uint8 images, cropped to `boxes` unless they already are."""
        parts = [_nothing(uniforms) if boxes is None else boxes, *self._colour(uniforms, images.shape[1])]
        numbers = to_device(np.concatenate(parts, axis=1), images.device)
        widths = [part.shape[1] for part in parts]
        views: Tensor = self._views(images, numbers, *self.pixels.factors(images.device), widths, self.image_size)
        return views

    def _colour(self, uniforms: Float32Array, channels: int) -> tuple[Float32Array, ...]:
        """Blends before the rotation of the hue, the rotation, blends after it, and the blur, as `_views` takes them.

        Brightness, contrast, saturation and the hue are applied in the visit's order, so each of the first three has a
        place on both sides of the hue. A place that a visit does not use leaves the image unchanged.
        """
        config, rows = self.config, np.arange(len(uniforms))
        if not config.strong:
            return (_nothing(uniforms),) * 4
        jitters = config.jitter_probability > 0
        strengths = [config.brightness, config.contrast, *[config.saturation] * (channels == 3)] if jitters else []
        turns = jitters and channels == 3 and config.hue > 0
        jittered = uniforms[:, _Column.JITTER] < config.jitter_probability
        order = _PLACES[(uniforms[:, _Column.ORDER].astype(np.float64) * len(_PLACES)).astype(np.int64)]
        blends = np.zeros((len(rows), len(strengths) * (1 + turns) + (channels == 3), 3), np.float32)
        blends[..., 0] = 1
        for part, strength in enumerate(strengths):
            factor = np.maximum(1 + strength * _symmetric(uniforms[:, _Column.BRIGHTNESS + part]), 0)
            place = (order[:, : len(strengths)] < order[:, [part]]).sum(axis=1)
            place += len(strengths) * (turns & (order[:, part] > order[:, _HUE]))
            blend = np.stack([factor, (1 - factor) * (part == _SATURATION), (1 - factor) * (part == _CONTRAST)], axis=1)
            blends[rows[jittered], place[jittered]] = blend[jittered]
        if channels == 3:
            blends[uniforms[:, _Column.GREY] < config.grey_probability, -1] = 0, 1, 0
        turn = np.where(jittered, config.hue * _symmetric(uniforms[:, _Column.HUE]), 0)[:, None]
        before = len(strengths) if turns else 0
        return (
            blends[:, :before].reshape(len(rows), -1),
            turn if turns else _nothing(uniforms),
            blends[:, before:].reshape(len(rows), -1),
            self._taps(uniforms) if config.blur_probability > 0 else _nothing(uniforms),
        )

    def _taps(self, uniforms: Float32Array) -> Float32Array:
        """Weights of the blur, float32 [B, taps]; without a blur, 1 in the middle."""
        low, high = self.config.blur_sigma
        # as in SimCLR, the kernel is a tenth of the side; an image of one pixel cannot be mirrored
        radius = min(max(1, self.image_size // 10 // 2), self.image_size - 1)
        sigma = low + (high - low) * uniforms[:, [_Column.BLUR_SIGMA]].astype(np.float64)
        distance = np.arange(-radius, radius + 1)
        weights = np.exp(-0.5 * (distance / sigma) ** 2)
        chosen = uniforms[:, [_Column.BLUR]] < self.config.blur_probability
        taps: Float32Array = np.where(chosen, weights / weights.sum(axis=1, keepdims=True), distance == 0).astype("f4")
        return taps


class Unchanged(Augmentation):
    """Leaves images unchanged, or takes the centre squares of decoded ones: to measure everything else."""

    def __init__(self, image_size: int, pixels: PixelScale = MINUS_ONE_TO_ONE) -> None:
        super().__init__(AugmentationConfig(strong=False), image_size, pixels)

    def __call__(self, images: Tensor, uniforms: Tensor | Float32Array) -> Tensor:
        return normalise(images, self.pixels)

    def finish(self, crops: Tensor, uniforms: Tensor | Float32Array) -> Tensor:
        return normalise(crops, self.pixels)

    def crops(self, uniforms: Float32Array) -> Sequence[ChosenBox]:
        return [centre] * len(uniforms)


def _on_host(uniforms: Tensor | Float32Array) -> Float32Array:
    return uniforms.cpu().numpy() if isinstance(uniforms, Tensor) else uniforms


def _nothing(uniforms: Float32Array) -> Float32Array:
    return np.zeros((len(uniforms), 0), np.float32)


def _symmetric(uniforms: Float32Array) -> Float32Array:
    """Uniform in [-1, 1)."""
    numbers: Float32Array = 2 * uniforms - 1
    return numbers


def _in_image(boxes: Int64Array, width: int, height: int) -> Float32Array:
    """Centres, x and y, and half the sides of boxes [B, 5]: float32 [B, 4], where the image spans -1..1 in both
    directions.

    A half width is negative if the box is flipped.
    """
    left, top, right, bottom, flipped = boxes.astype(np.float64).T
    half_width = np.where(flipped, left - right, right - left) / width
    return np.stack(
        [(left + right) / width - 1, (top + bottom) / height - 1, half_width, (bottom - top) / height], axis=1
    ).astype(np.float32)


# ---- on the device: no shape depends on a value, and no value is read back


def _views(images: Tensor, numbers: Tensor, scale: Tensor, shift: Tensor, widths: list[int], image_size: int) -> Tensor:
    """Normalised views of uint8 images [B, C, H, W] with the parameters `numbers`, float32 [B, sum(widths)].

    The parameters are, in order: a box (4, see `_in_image`), blends (3 each), a rotation of the hue (1), blends,
    weights of a blur; each part may be missing.
    """
    boxes, before, turn, after, taps = torch.split(numbers, widths, dim=1)
    views = images.float() / 255
    if boxes.shape[1]:
        views = _crop(views, boxes, image_size)
    views = _blend(views, before)
    if turn.shape[1]:
        views = _rotate_hue(views, turn[:, :, None, None])
    views = _blend(views, after)
    if taps.shape[1]:
        views = _blur(views, taps)
    return views * scale + shift


def _crop(images: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Resamples each image's box to side × side pixels, bilinearly."""
    x, y, half_width, half_height = boxes[:, :, None].unbind(dim=1)  # (B, 1) each
    pixels = (2 * torch.arange(side, device=images.device) + 1) / side - 1  # centres, where the box spans -1..1
    columns, rows = x + half_width * pixels, y + half_height * pixels  # (B, side) each
    grid = torch.stack(
        [columns[:, None, :].expand(-1, side, -1), rows[:, :, None].expand(-1, -1, side)], dim=-1
    )  # (B, side, side, 2)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _blend(views: Tensor, blends: Tensor) -> Tensor:
    """Weighted sums, clamped to 0..1, of an image, its grey and the mean of its grey; one blend after another.

    Brightness, contrast, saturation and greyness are such sums (torchvision's _blend).
    """
    for start in range(0, blends.shape[1], 3):
        own, grey, mean = blends[:, start : start + 3, None, None, None].unbind(dim=1)  # (B, 1, 1, 1) each
        luma = views
        if views.shape[1] == 3:
            red, green, blue = torch.split(views, 1, dim=1)
            luma = _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue
        views = (own * views).add_(grey * luma + mean * luma.mean(dim=(1, 2, 3), keepdim=True)).clamp_(0, 1)
    return views


def _rotate_hue(views: Tensor, turn: Tensor) -> Tensor:
    """Rotates the hue of colour images in 0..1 by fractions of the circle [B, 1, 1, 1]; keeps value and saturation.

    HSV of Smith (SIGGRAPH 1978), in sixths of the circle: a channel is the value minus the chroma times a trapezoid
    function of the distance between the hue and the channel's own hue: 0 for red, 2 for green, 4 for blue.
    """
    red, green, blue = torch.split(views, 1, dim=1)
    value = views.amax(dim=1, keepdim=True)
    chroma = value - views.amin(dim=1, keepdim=True)
    raw = torch.where(
        value == red, green - blue, torch.where(value == green, blue - red + 2 * chroma, red - green + 4 * chroma)
    )
    hue = raw / (chroma + (chroma == 0)) + 6 * turn  # torch.where would wait for a number to reach the GPU
    distance = hue - 2 * torch.arange(3, device=views.device).view(-1, 1, 1)  # (B, 3, H, W)
    distance = (distance - 6 * torch.round(distance / 6)).abs()  # within half the circle
    return value - chroma * (distance - 1).clamp(0, 1)


def _blur(views: Tensor, taps: Tensor) -> Tensor:
    """Convolves each image with its weights [B, taps] in both directions; pixels are mirrored at the edges."""
    radius = taps.shape[1] // 2
    planes = F.pad(views, (radius,) * 4, mode="reflect").transpose(0, 1)  # a group for each image: (C, B, H, W)
    planes = F.conv2d(planes, taps[:, None, None, :], groups=len(taps))
    planes = F.conv2d(planes, taps[:, None, :, None], groups=len(taps))
    return planes.transpose(0, 1)
