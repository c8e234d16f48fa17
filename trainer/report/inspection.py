"""Inspects an encoder: nearest neighbours as pictures to embed in a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from trainer.data import Dataset
from trainer.data.listing import NO_LABEL
from trainer.evaluate.features import encode
from trainer.model import EncoderConfig

_NUM_SAMPLES = 12
_NUM_NEIGHBOURS = 7
_MAX_SIDE = 112


@dataclass(frozen=True)
class Picture:
    """An image of the data set as a data: URI, with its label and similarity."""

    uri: str
    index: int
    label: str = ""
    similarity: float = 1.0
    agrees: bool | None = None
    """Whether it has the same label as the sample; None if one of them has none."""


@dataclass(frozen=True)
class InspectedImage:
    """A sampled image and its nearest neighbours."""

    sample: Picture
    neighbours: list[Picture]


@dataclass(frozen=True)
class Inspection:
    images: list[InspectedImage]
    bank: int
    """Number of training images among which neighbours were searched."""
    labelled: bool


def inspect_encoder(
    encoder: nn.Module, config: EncoderConfig, dataset: Dataset, *, bank: int, seed: int = 0
) -> Inspection:
    """Inspects a dozen of `bank` training images, chosen by `seed`: these are spread evenly, since images that lie next
    to each other may be of one class.

    Raises:
        ValueError: fewer than two images, or images with another number of channels than the encoder's.
    """
    images, number = dataset.train_images, min(max(0, bank), len(dataset.train_images))
    if number < 2:
        raise ValueError(f"{number} images are too few to have neighbours: give at least 2")
    if images.shape[1] != config.in_channels:
        raise ValueError(
            f"the encoder takes {config.in_channels}-channel images, the data set has {images.shape[1]}-channel ones: "
            "give the data set that it was trained on"
        )
    spread = torch.arange(number) * len(images) // number
    features = F.normalize(encode(encoder, images, dataset.evaluated_side, config.pixels, ids=spread))  # (N, d)
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randperm(number, generator=generator)[:_NUM_SAMPLES]
    similarity = features[samples] @ features.T  # (samples, N)
    similarity[torch.arange(len(samples)), samples] = -torch.inf  # not itself
    nearest = similarity.topk(min(_NUM_NEIGHBOURS, number - 1))
    labels = dataset.train_labels[spread].tolist() if dataset.labelled else []
    names = _names(labels, dataset.class_names)

    def picture(index: int, cosine: float = 1.0, sample: int | None = None) -> Picture:
        label = names[index] if names else ""
        both = (labels[index], labels[sample]) if names and sample is not None else (NO_LABEL, NO_LABEL)
        agrees = None if NO_LABEL in both else both[0] == both[1]
        (image,) = images[spread[[index]]]
        return Picture(_uri(image), int(spread[index]), label, cosine, agrees)

    inspected = []
    for sample, cosines, ids in zip(samples.tolist(), nearest.values, nearest.indices, strict=True):
        neighbours = [picture(i, cosine, sample) for i, cosine in zip(ids.tolist(), cosines.tolist(), strict=True)]
        inspected.append(InspectedImage(picture(sample), neighbours))
    return Inspection(inspected, number, dataset.labelled)


def _names(labels: list[int], names: Sequence[str]) -> list[str]:
    """The classes of images, by name if they have names."""
    return ["no label" if label < 0 else names[label] if names else str(label) for label in labels]


def _uri(image: Tensor) -> str:
    """An image uint8 [C, H, W] as a PNG in a data: URI."""
    picture = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).squeeze(2).numpy()))
    picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
