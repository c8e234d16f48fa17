"""Object detection on Pascal VOC by fine-tuning the whole encoder (paper, appendix, Object Detection on Pascal VOC).

The encoder, a ResNet, becomes a Faster R-CNN on its fourth stage (`trainer.evaluate.detection.network`), which is
trained on trainval of 2007 and 2012 and tested on test of 2007. Objects marked difficult are trained on, as in
Detectron2, and ignored in the test. Training images without objects are left out; of test images, none is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from trainer.data.pixels import PixelScale
from trainer.evaluate.detection.average_precision import Objects, Precision, average_precision
from trainer.evaluate.detection.config import DetectConfig
from trainer.evaluate.detection.detectron2 import write_detectron2
from trainer.evaluate.detection.inference import detect_objects
from trainer.evaluate.detection.network import FasterRCNN
from trainer.evaluate.detection.training import DetectorTraining
from trainer.evaluate.detection.voc import CLASSES, VocImage, check_decodable, read_split
from trainer.evaluate.progress import Progress, no_progress
from trainer.evaluate.resnet import resnet_stages
from trainer.model import EncoderConfig
from weightserver.torch import Ranks

__all__ = ["DetectConfig", "DetectResult", "detect", "write_detectron2"]


@dataclass(frozen=True, kw_only=True)
class DetectResult:
    """Average precisions in percent on the test split."""

    ap: float
    """Mean over overlaps of 0.5, 0.55, …, 0.95."""
    ap50: float
    ap75: float
    by_class: dict[str, float]
    """AP of each class that the test split has."""


def detect(
    encoder: nn.Module,
    encoder_config: EncoderConfig,
    data_dir: Path,
    config: DetectConfig,
    ranks: Ranks | None = None,
    *,
    bfloat16: bool = False,
    state_file: Path | None = None,
    progress: Progress = no_progress,
) -> DetectResult:
    """Trains a detector from the encoder's weights and tests it. The encoder stays as it is.

    The result does not depend on the number of ranks, up to rounding. With `state_file` an interrupted run of the same
    settings continues from its last saved state to the result of an uninterrupted one.

    Args:
        data_dir: the folder of VOCdevkit, or VOCdevkit itself.
        bfloat16: whether convolutions compute in bfloat16 (autocast).

    Raises:
        ValueError: the encoder is not a ResNet for colour images.
        ValueError: an image or annotation is missing, damaged or not of VOC.
        ValueError: the loss is not finite.
    """
    ranks = ranks or Ranks()
    config.check()
    detector, pixels = build_detector(encoder, encoder_config, config)
    train, test = read_splits(data_dir, config)
    check_decodable(test, ranks, progress)
    training = DetectorTraining(detector, pixels, config, ranks, bfloat16=bfloat16)
    training.train(train, state_file, progress)
    training.measure_norms(train, progress)
    detections = detect_objects(training.detector, test, pixels, config, ranks, bfloat16=bfloat16, progress=progress)
    return _result(average_precision(objects_of(test), detections, len(CLASSES)))


def build_detector(
    encoder: nn.Module, encoder_config: EncoderConfig, config: DetectConfig
) -> tuple[FasterRCNN, PixelScale]:
    """The untrained detector with the encoder's weights, and the scale of its input.

    Raises:
        ValueError: the encoder is not a ResNet for colour images.
    """
    stages = resnet_stages(encoder, encoder_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return FasterRCNN(stages, config, len(CLASSES)), encoder_config.pixels.channels(3)


def read_splits(data_dir: Path, config: DetectConfig) -> tuple[list[VocImage], list[VocImage]]:
    """The training images with objects, and all test images.

    Raises:
        ValueError: a file is missing or damaged, fewer training images than a batch, or nothing to find.
    """
    train = [image for split in config.train_splits for image in read_split(data_dir, split) if len(image.boxes)]
    test = read_split(data_dir, config.test_split)
    if len(train) < config.batch_size:
        raise ValueError(
            f"{len(train)} training images with objects make no batch of {config.batch_size}: "
            "give a smaller --batch-size"
        )
    if all(image.difficult.all() for image in test):
        raise ValueError(f"{config.test_split} has no objects to find: give another --test-split")
    return train, test


def objects_of(images: Sequence[VocImage]) -> Objects:
    """The objects on the images, which are numbered in their order."""
    return Objects(
        images=np.repeat(np.arange(len(images)), [len(image.labels) for image in images]),
        labels=np.concatenate([image.labels for image in images]),
        boxes=np.concatenate([image.boxes for image in images]).astype(np.float64),
        difficult=np.concatenate([image.difficult for image in images]),
    )


def _result(precision: Precision) -> DetectResult:
    means = {name: values.mean() for name, values in zip(CLASSES, precision.by_class, strict=True)}
    return DetectResult(
        ap=precision.mean,
        ap50=precision.at(0.5),
        ap75=precision.at(0.75),
        by_class={name: float(mean) for name, mean in means.items() if not np.isnan(mean)},
    )
