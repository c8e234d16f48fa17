"""Features to evaluate: of an encoder, trained or not, or raw pixels."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from trainer.data import Dataset, TrainImages
from trainer.data.pixels import MINUS_ONE_TO_ONE, PixelScale, normalise
from trainer.model import EncoderConfig, build_model
from weightserver.common.background import computed_ahead
from weightserver.torch import to_device

_BATCH_SIZE = 500
_CALIBRATED = 5_000
"""Images of which the BatchNorm statistics of an untrained encoder are."""
PIXELS_SIDE = 32
RAW = PixelScale((0.0,), (1.0,))
"""Pixels from 0 to 1."""

Advance = Callable[..., None]
"""advance(n=1, **shown): n more items are done; `shown` are numbers to show, tensors such as loss=…."""


class RawPixels(nn.Module):
    """The pixels themselves as features, flattened; of larger images, averages over 32 x 32 areas."""

    def forward(self, images: Tensor) -> Tensor:
        if max(images.shape[2:]) > PIXELS_SIDE:
            images = F.interpolate(images, (PIXELS_SIDE, PIXELS_SIDE), mode="area")
        return images.flatten(1)


class Frozen:
    """An encoder on `device`, in eval mode (BatchNorm uses running statistics), whose state nothing changes."""

    def __init__(self, encoder: nn.Module, pixels: PixelScale, device: torch.device, *, bfloat16: bool = False) -> None:
        self._encoder = encoder.eval()
        self._before = {name: value.clone() for name, value in encoder.state_dict().items()}
        self._bfloat16 = bfloat16
        self.pixels, self.device = pixels, device
        self._is_finite = torch.ones((), dtype=torch.bool, device=device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features float32 [B, d] of normalised images."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16):
            features: Tensor = self._encoder(images.contiguous(memory_format=torch.channels_last))
        features = features.float().flatten(1)
        self._is_finite &= features.isfinite().all()  # read in `check`, since that waits for the GPU
        return features

    def of_pixels(self, images: Tensor) -> Tensor:
        """Features float32 [B, d] of images uint8 [B, C, H, W]."""
        return self(normalise(to_device(images, self.device), self.pixels))

    @torch.no_grad()
    def of_images(
        self, images: TrainImages, side: int | None, ids: Tensor, batch_size: int = 256, advance: Advance | None = None
    ) -> Tensor:
        """Features float32 [n, d], on the CPU, of `centres`; `advance` is told the number of each batch."""
        features = []
        for batch in centres(images, side, ids, batch_size):
            features.append(self.of_pixels(batch).cpu())
            if advance is not None:
                advance(len(batch))
        return torch.cat(features) if features else torch.zeros(0)

    def check(self) -> None:
        """Raises RuntimeError if a parameter or a BatchNorm buffer has changed, ValueError for infinite features."""
        for name, value in self._encoder.state_dict().items():
            if not torch.equal(value.nan_to_num(), self._before[name].nan_to_num()):
                raise RuntimeError(f"{name} of the frozen encoder has changed: its evaluation is void")
        if not self._is_finite:
            raise ValueError("the encoder's features are not all finite: are its weights damaged?")


def centres(images: TrainImages, side: int | None, ids: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Batches uint8 [b, C, side, side] of the centre squares of images `ids` (int64 [n]), whole images for side None.

    The next batch is decoded while the caller uses the last one.
    """
    edge = 0 if side is None else (images.shape[-1] - side) // 2
    inner = slice(edge, None if side is None else edge + side)
    batches = map(images.__getitem__, torch.split(ids, batch_size))
    with closing(computed_ahead(batches, ahead=1, name="batches")) as decoded:
        for batch in decoded:
            yield batch[..., inner, inner]


def encode(
    encoder: nn.Module,
    images: TrainImages,
    side: int | None = None,
    pixels: PixelScale = MINUS_ONE_TO_ONE,
    *,
    ids: Tensor | None = None,
    batch_size: int = _BATCH_SIZE,
) -> Tensor:
    """Features float32 [n, d], on the CPU, of images uint8 [N, C, H, W], or of their centres with sides of `side`.

    They are computed in eval mode where the encoder is, whose mode is restored.

    Args:
        ids: int64 [n], the images; all of them by default.
    """
    was_training = encoder.training
    device = next((parameter.device for parameter in encoder.parameters()), torch.device("cpu"))
    frozen = Frozen(encoder, pixels, device)
    try:
        return frozen.of_images(images, side, torch.arange(len(images)) if ids is None else ids, batch_size)
    finally:
        encoder.train(was_training)


@dataclass(frozen=True, kw_only=True)
class FeatureSet:
    """Features and labels of a data set's training and test images, on the CPU."""

    train: Tensor
    """float32 [N, d]."""
    train_labels: Tensor
    """int64 [N]."""
    test: Tensor
    """float32 [M, d]."""
    test_labels: Tensor
    """int64 [M]."""


def encoder_features(encoder: nn.Module, dataset: Dataset, pixels: PixelScale = MINUS_ONE_TO_ONE) -> FeatureSet:
    """The features of the training images and of the test images, as of `encode`.

    `pixels` is the encoder's scale (`EncoderConfig.pixels`), here and below.

    Raises:
        ValueError: a data set without labels.
    """
    dataset.check_labelled()
    return FeatureSet(
        test=encode(encoder, dataset.test_images, dataset.evaluated_side, pixels),  # first, as a broken one ends it
        test_labels=dataset.test_labels,
        train=encode(encoder, dataset.train_images, dataset.evaluated_side, pixels),
        train_labels=dataset.train_labels,
    )


def pixel_features(dataset: Dataset) -> FeatureSet:
    """`RawPixels` in 0..1. Raises ValueError for a data set without labels."""
    return encoder_features(RawPixels(), dataset, RAW)


def untrained_encoder(config: EncoderConfig, dataset: Dataset, seed: int) -> nn.Module:
    """The encoder that training with `seed` starts from, with BatchNorm statistics calibrated on training images."""
    encoder = build_model(config, seed=seed).encoder
    return calibrate_batch_norm(encoder, dataset.train_images, dataset.evaluated_side, config.pixels)


def calibrate_batch_norm(
    encoder: nn.Module, images: TrainImages, side: int | None = None, pixels: PixelScale = MINUS_ONE_TO_ONE
) -> nn.Module:
    """Returns a copy of `encoder` whose BatchNorm statistics are the averages over 5,000 images, or over their centres
    with sides of `side`.

    Images are uint8 [N, C, H, W], and may be sorted by class: those of a batch lie anywhere among them. This makes the
    comparison with an untrained encoder fair: its initial statistics (mean 0, variance 1) describe no data.
    """
    encoder, device = copy.deepcopy(encoder), next(encoder.parameters()).device
    number = min(_CALIBRATED, len(images))
    num_batches = math.ceil(number / _BATCH_SIZE)
    spread = torch.arange(number) * len(images) // number
    ids = torch.cat([spread[batch::num_batches] for batch in range(num_batches)])
    size = math.ceil(number / num_batches)  # all batches count the same, and one image fails
    batches = (normalise(batch.to(device), pixels) for batch in centres(images, side, ids, size))
    update_bn((batch.contiguous(memory_format=torch.channels_last) for batch in batches), encoder)
    return encoder.eval()
