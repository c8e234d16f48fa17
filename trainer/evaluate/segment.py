"""Semantic segmentation on Cityscapes by a fully convolutional network (paper, appendix; He et al., 1911.05722).

All layers are trained, from the encoder's weights. Validation images are segmented whole, at their own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from trainer.data.pixels import PixelScale, normalise
from trainer.evaluate.progress import Progress, no_progress
from trainer.evaluate.resnet import resnet_stages
from trainer.evaluate.segmentation.cityscapes import (
    IGNORED,
    NUM_CLASSES,
    LabelledImage,
    check_files,
    class_names,
    list_split,
    read_image,
    read_labels,
)
from trainer.evaluate.segmentation.network import FCN, predict
from trainer.evaluate.segmentation.training import SegmentConfig, Trainer
from trainer.model import EncoderConfig
from trainer.torchvision_schemas import import_module
from weightserver.torch import Ranks

__all__ = ["SegmentConfig", "SegmentResult", "segment"]


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """Intersection over union on the validation images, in percent."""

    miou: float
    """The mean over classes that any pixel has, or is taken for."""
    iou: dict[str, float | None]
    """By class; None for a class that no pixel has or is taken for."""
    num_train_images: int
    num_val_images: int


def segment(
    encoder: nn.Module,
    encoder_config: EncoderConfig,
    directory: Path,
    config: SegmentConfig,
    ranks: Ranks | None = None,
    *,
    bfloat16: bool = False,
    state_file: Path | None = None,
    progress: Progress = no_progress,
) -> SegmentResult:
    """Trains a segmentation network on the fine training set, and evaluates it on the validation set.

    The result does not depend on the number of ranks, up to rounding: each takes its part of every batch and of the
    validation images, and BatchNorm uses the whole batch. With `state_file` an interrupted training resumes.

    Args:
        encoder: a ResNet; its weights are copied.
        directory: the folder of Cityscapes, with leftImg8bit and gtFine. All labels and all validation images are
            decoded before the training, so that a damaged one is found early.
        bfloat16: whether the network computes in bfloat16 (autocast).

    Raises:
        ValueError: the encoder is not a ResNet.
        ValueError: a folder, image or label is missing or damaged, or `state_file` is of another training.
    """
    ranks = ranks or Ranks()
    stages = resnet_stages(encoder, encoder_config)
    train_images, val_images = list_split(directory, "train"), list_split(directory, "val")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = FCN(stages, NUM_CLASSES)
    pixels = encoder_config.pixels
    trainer = Trainer(
        network, pixels, train_images, config, ranks, identity=_identity(network, train_images), bfloat16=bfloat16
    )
    _check_files(train_images, val_images, ranks, progress)
    trainer.train(state_file, progress)
    evaluated = _Segmenter(trainer.network, pixels, ranks, bfloat16=bfloat16)
    miou, iou = evaluated.intersection_over_union(val_images, progress)
    return SegmentResult(
        miou=miou,
        iou=dict(zip(class_names(), iou, strict=True)),
        num_train_images=len(train_images),
        num_val_images=len(val_images),
    )


class _Segmenter:
    """Segments whole images with a trained network."""

    def __init__(self, network: nn.Module, pixels: PixelScale, ranks: Ranks, *, bfloat16: bool) -> None:
        self._network, self._pixels, self._ranks, self._bfloat16 = network.eval(), pixels, ranks, bfloat16

    def intersection_over_union(
        self, images: Sequence[LabelledImage], progress: Progress
    ) -> tuple[float, list[float | None]]:
        """The mean over classes and each class, in percent, over the images of all ranks; each is counted once."""
        metrics = import_module("torchmetrics.classification")
        metric = metrics.MulticlassJaccardIndex(
            NUM_CLASSES, average="none", ignore_index=IGNORED, validate_args=False, sync_on_compute=False
        )
        metric.update(*[torch.empty(0, dtype=torch.int64)] * 2)  # a rank may have no image
        mine = images[self._ranks.share(len(images))]
        with progress("validation", len(images)) as advance:
            for pair in mine:
                metric.update(self._classes(pair).long(), torch.from_numpy(read_labels(pair.label)).long())
                advance(self._ranks.world_size)
        sums = self._ranks.sum_over_ranks(metric.confmat.flatten().tolist())
        confusion = torch.tensor(sums, dtype=torch.int64).view(NUM_CLASSES, NUM_CLASSES)
        metric.confmat = confusion
        iou = 100 * metric.compute().double()
        occurs = confusion.sum(dim=0) + confusion.sum(dim=1) > 0
        return iou[occurs].mean().item(), [
            value if seen else None for value, seen in zip(iou.tolist(), occurs.tolist(), strict=True)
        ]

    @torch.no_grad()
    def _classes(self, pair: LabelledImage) -> Tensor:
        """The class of each pixel of an image: uint8 [height, width], on the CPU."""
        device = self._ranks.device
        pixels = torch.from_numpy(np.array(read_image(pair.image))).permute(2, 0, 1)
        images = normalise(pixels[None].to(device), self._pixels).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bfloat16):
            logits = self._network(images)
        return predict(logits[0], *pixels.shape[1:]).cpu()


def _check_files(
    train_images: Sequence[LabelledImage], val_images: Sequence[LabelledImage], ranks: Ranks, progress: Progress
) -> None:
    """Raises the same ValueError on all ranks where rank 0 finds a damaged file."""
    problem = ""
    if ranks.is_first:
        try:
            with progress("checking files", len(train_images) + len(val_images)) as advance:
                check_files(train_images, decode=False, advance=advance)
                check_files(val_images, decode=True, advance=advance)
        except ValueError as error:
            problem = str(error)
    if problem := ranks.broadcast_text(problem):
        raise ValueError(problem)


def _identity(network: nn.Module, images: Sequence[LabelledImage]) -> str:
    """A digest of a network's weights and the names of its training images."""
    digest = xxhash.xxh3_128()
    for name, value in network.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    for pair in images:
        digest.update(f"{pair.image.parent.name}/{pair.image.name}\0".encode())
    return digest.hexdigest()
