"""Inspects an encoder: nearest neighbours and saliency, as pictures to embed in a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from trainer.data import Dataset
from trainer.data.pixels import MINUS_ONE_TO_ONE, PixelScale
from trainer.evaluate.features import encode
from trainer.model import EncoderConfig

_NUM_SAMPLES = 12
_NUM_NEIGHBOURS = 7
_NOISY_COPIES, _NOISE = 24, 0.15
"""Number of noisy copies for SmoothGrad, and their noise as a fraction of the pixels' range."""
_MAX_SIDE = 112


@dataclass(frozen=True)
class Picture:
    """An image of the data set as a data: URI, with its label and similarity."""

    uri: str
    index: int
    label: str = ""
    similarity: float = 1.0
    agrees: bool | None = None
    """Whether it has the same label as the sample; None without labels."""


@dataclass(frozen=True)
class InspectedImage:
    """A sampled image, its nearest neighbours, and its saliency as a data: URI."""

    sample: Picture
    neighbours: list[Picture]
    saliency: str


@dataclass(frozen=True)
class Inspection:
    images: list[InspectedImage]
    bank: int
    """Number of training images among which neighbours were searched."""
    labelled: bool


@dataclass(frozen=True)
class Pair:
    """Two images that are nearly the same; `other.agrees` says whether they have the same label."""

    one: Picture
    other: Picture


def show_pairs(dataset: Dataset, pairs: Sequence[tuple[int, int, float]]) -> list[Pair]:
    """Pictures of pairs of training images, given by their positions and their cosine.

    Raises:
        ValueError: the data set has no such image.
    """
    numbers = [number for *images, _ in pairs for number in images]
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(dataset.train_images):
        raise ValueError(f"image {max(numbers)} is not among its {len(dataset.train_images)} images")
    labels = dataset.train_labels.tolist() if dataset.labelled else []
    shown = []
    for one, other, cosine in pairs:
        first, second = (_uri(image) for image in dataset.train_images[torch.tensor([one, other])])
        named = [str(labels[number]) if labels else "" for number in (one, other)]
        agrees = named[0] == named[1] if labels else None
        shown.append(Pair(Picture(first, one, named[0]), Picture(second, other, named[1], cosine, agrees)))
    return shown


def inspect_encoder(
    encoder: nn.Module, config: EncoderConfig, dataset: Dataset, *, bank: int, seed: int = 0
) -> Inspection:
    """Inspects a dozen of the first `bank` training images, chosen by `seed`.

    Raises:
        ValueError: fewer than two images, or images with another number of channels than the encoder's.
    """
    images = dataset.train_images[: max(0, bank)]  # uint8 (N, C, H, W)
    if len(images) < 2:
        raise ValueError(f"{len(images)} images are too few to have neighbours: give at least 2")
    if images.shape[1] != config.in_channels:
        raise ValueError(
            f"the encoder takes {config.in_channels}-channel images, the data set has {images.shape[1]}-channel ones: "
            "give the data set that it was trained on"
        )
    features = F.normalize(encode(encoder, images, pixels=config.pixels))  # (N, d)
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randperm(len(images), generator=generator)[:_NUM_SAMPLES]
    similarity = features[samples] @ features.T  # (samples, N)
    similarity[torch.arange(len(samples)), samples] = -torch.inf  # not itself
    nearest = similarity.topk(min(_NUM_NEIGHBOURS, len(images) - 1))
    maps = saliency(encoder, images[samples], generator, config.pixels)
    labels = [str(label) for label in dataset.train_labels[: len(images)].tolist()]

    def picture(index: int, cosine: float = 1.0, sample: int | None = None) -> Picture:
        label = labels[index] if labels else ""
        agrees = label == labels[sample] if labels and sample is not None else None
        return Picture(_uri(images[index]), index, label, cosine, agrees)

    inspected = []
    for sample, cosines, ids, heat in zip(samples.tolist(), nearest.values, nearest.indices, maps, strict=True):
        neighbours = [picture(i, cosine, sample) for i, cosine in zip(ids.tolist(), cosines.tolist(), strict=True)]
        inspected.append(InspectedImage(picture(sample), neighbours, _heat_uri(heat)))
    return Inspection(inspected, len(images), dataset.labelled)


def saliency(
    encoder: nn.Module, images: Tensor, generator: torch.Generator, pixels: PixelScale = MINUS_ONE_TO_ONE
) -> Tensor:
    """How much each pixel changes the length of the feature vector: float32 [n, H, W] in 0..1, of uint8 [n, C, H, W].

    The largest |gradient| over channels of ‖features‖, averaged over noisy copies of the image (SmoothGrad, Smilkov et
    al., 1706.03825) and over a few pixels around, in parts of the image's 99th percentile. It needs the encoder, whose
    scale is `pixels`, and no row.
    """
    encoder.eval()
    maps = []
    scale, shift = pixels.factors(images.device)
    for image in images.float() / 255:
        noise = torch.randn(_NOISY_COPIES, *image.shape, generator=generator) * _NOISE
        views = (image + noise).requires_grad_()
        (gradient,) = torch.autograd.grad(encoder(views * scale + shift).norm(dim=1).sum(), views)
        heat = gradient.abs().mean(dim=0).amax(dim=0)[None]  # (1, H, W)
        smooth = image.shape[-1] // 28 * 2 + 1  # strides leave a pattern
        heat = F.avg_pool2d(heat, smooth, stride=1, padding=smooth // 2, count_include_pad=False)[0]
        maps.append((heat / heat.quantile(0.99).clamp(min=1e-12)).clamp(max=1))
    return torch.stack(maps)


def _uri(image: Tensor) -> str:
    """Encodes an image uint8 [C, H, W] as PNG."""
    pixels = image.permute(1, 2, 0).squeeze(2).numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).numpy()
    return _png(Image.fromarray(np.ascontiguousarray(pixels)))


def _heat_uri(heat: Tensor) -> str:
    """Encodes a map float32 [H, W] in 0..1 as PNG, dark to bright."""
    return _png(Image.fromarray(mpl.colormaps["inferno"](heat.numpy(), bytes=True)[..., :3].copy()))


def _png(image: Image.Image) -> str:
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
