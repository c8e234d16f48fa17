"""Features to evaluate: of an encoder, trained or not, or raw pixels."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from trainer.data import Dataset, TrainImages
from trainer.data.pixels import MINUS_ONE_TO_ONE, PixelScale, normalise
from trainer.evaluate.frozen import centres
from trainer.evaluate.protocol import split_tests
from trainer.model import EncoderConfig, build_model

_BATCH_SIZE = 500
PIXELS_SIDE = 32


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

    def tested(self) -> "FeatureSet":
        """These features, or, without test images, with a tenth of the training images in their place: an encoder that
        learned without labels has seen them, but not their classes."""
        if len(self.test):
            return self
        fitted, held_out = split_tests(self.train_labels)
        return FeatureSet(
            train=self.train[fitted],
            train_labels=self.train_labels[fitted],
            test=self.train[held_out],
            test_labels=self.train_labels[held_out],
        )


def encoder_features(encoder: nn.Module, dataset: Dataset, pixels: PixelScale = MINUS_ONE_TO_ONE) -> FeatureSet:
    """Computes features of an encoder in eval mode (BatchNorm uses running statistics), then restores its mode.

    `pixels` is the encoder's scale (`EncoderConfig.pixels`), here and below.

    Raises:
        ValueError: a data set without labels.
    """
    return _of_both(dataset, lambda images: encode(encoder, images, dataset.evaluated_side, pixels))


def pixel_features(dataset: Dataset) -> FeatureSet:
    """The pixels themselves, 0..1, flattened; of larger images, averages over 32 x 32 areas.

    Raises:
        ValueError: a data set without labels.
    """
    return _of_both(dataset, lambda images: _flat_pixels(images, dataset.evaluated_side))


def _of_both(dataset: Dataset, features_of: Callable[[TrainImages], Tensor]) -> FeatureSet:
    """The features of the training images and of the test images."""
    dataset.check_labelled()
    return FeatureSet(
        train=features_of(dataset.train_images),
        train_labels=dataset.train_labels,
        test=features_of(dataset.test_images),
        test_labels=dataset.test_labels,
    )


def _flat_pixels(images: TrainImages, side: int | None) -> Tensor:
    """Pixels float32 [N, d] in 0..1 of images uint8 [N, C, H, W]."""
    flat = []
    for batch in centres(images, side, torch.arange(len(images)), _BATCH_SIZE):
        pixels = batch.cpu().float() / 255
        if max(pixels.shape[2:]) > PIXELS_SIDE:
            pixels = F.interpolate(pixels, (PIXELS_SIDE, PIXELS_SIDE), mode="area")
        flat.append(pixels.flatten(1))
    return torch.cat(flat) if flat else torch.zeros(0)


def untrained_encoder(config: EncoderConfig, dataset: Dataset, seed: int) -> nn.Module:
    """The encoder that training with `seed` starts from, with BatchNorm statistics calibrated on training images."""
    return calibrate_batch_norm(build_model(config, seed=seed).encoder, dataset.train_images, pixels=config.pixels)


def calibrate_batch_norm(
    encoder: nn.Module, images: TrainImages, num_images: int = 5_000, pixels: PixelScale = MINUS_ONE_TO_ONE
) -> nn.Module:
    """Returns a copy of `encoder` whose BatchNorm statistics are the averages over the first `num_images` images.

    Images are uint8 [N, C, H, W]. This makes the comparison with an untrained encoder fair: its initial statistics
    (mean 0, variance 1) describe no data.
    """
    encoder = copy.deepcopy(encoder)
    update_bn((_prepare(encoder, batch, pixels) for batch in torch.split(images[:num_images], _BATCH_SIZE)), encoder)
    return encoder.eval()


@torch.no_grad()
def encode(
    encoder: nn.Module, images: TrainImages, side: int | None = None, pixels: PixelScale = MINUS_ONE_TO_ONE
) -> Tensor:
    """Features float32 [N, d], on the CPU, of images uint8 [N, C, H, W], or of their centres with sides of `side`."""
    was_training = encoder.training
    encoder.eval()
    batches = centres(images, side, torch.arange(len(images)), _BATCH_SIZE)
    features = [encoder(_prepare(encoder, batch, pixels)).float().cpu() for batch in batches]
    encoder.train(was_training)
    return torch.cat(features) if features else torch.zeros(0)


def _prepare(encoder: nn.Module, images: Tensor, pixels: PixelScale) -> Tensor:
    device = next(encoder.parameters()).device
    return normalise(images.to(device), pixels).contiguous(memory_format=torch.channels_last)
