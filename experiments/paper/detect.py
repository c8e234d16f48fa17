"""Object detection on Pascal VOC by fine-tuning the whole encoder (paper, appendix, Object Detection on Pascal VOC).

The encoder, a ResNet, becomes a Faster R-CNN on its fourth stage (`experiments.paper.detector`), which is trained
on trainval of 2007 and 2012 and tested on test of 2007. Objects marked difficult are trained on, as in Detectron2, and
ignored in the test. Training images without objects are left out; of test images, none is.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from experiments.paper.average_precision import THRESHOLDS, Detections, average_precision
from experiments.paper.crops import decoded_ahead
from experiments.paper.detector import build_detector
from experiments.paper.settings import DetectConfig
from experiments.paper.voc import CLASSES, VocImage, load_pixels, read_split
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.training import Training, check_batch
from weightserver.common.background import computed_ahead
from weightserver.torch import Ranks, to_device

_WARMUP_FACTOR = 0.001
_DROP_FACTOR = 0.1


def detect(evaluation: Evaluation, config: DetectConfig) -> Outcome:
    """Trains a detector from the encoder's weights and tests it. The encoder stays as it is.

    Ranks sample regions of their own images and average their losses, as in Detectron2: their number changes the result
    as another seed does.

    Raises:
        ValueError: the encoder is not a ResNet for colour images, or fewer images in a batch than ranks.
        ValueError: an image or annotation is missing, damaged or not of VOC; the loss is not finite.
    """
    ranks = evaluation.ranks
    detector = build_detector(*evaluation.encoder.require_encoder("detect"), config).to(ranks.device)
    train, test = read_splits(evaluation.folder("the folder of Pascal VOC, VOCdevkit"), config)
    check_batch(len(train), config.batch_size, ranks)
    network = _Loss(detector, config, bfloat16=evaluation.bfloat16)
    training = Training(
        evaluation,
        network,
        torch.optim.SGD(_parameter_groups(detector, config), lr=config.learning_rate, momentum=config.momentum),
        loss_of=lambda network, batch: network(batch),
        factor=lambda step: learning_rate_factor(config, step),
    )

    def from_step(step: int) -> Generator[Batch, None, None]:
        return batches(train, config, ranks, step)

    training.run("network", from_step, num_steps=config.iterations, save_every=config.save_every)
    if config.precise_norm_batches:
        with closing(from_step(config.iterations)) as further:
            update_bn(([batch] for batch in islice(further, config.precise_norm_batches)), network)
    detections = detect_objects(detector, test, config, evaluation)
    by_class = average_precision([image.objects for image in test], detections, len(CLASSES))
    at_50, at_75 = (by_class[:, THRESHOLDS.index(threshold)] for threshold in (0.5, 0.75))
    results = {"ap": by_class, "ap50": at_50, "ap75": at_75}
    means = zip(CLASSES, by_class.mean(axis=1).tolist(), strict=True)
    return Outcome(
        results={name: float(np.nanmean(values)) for name, values in results.items()},
        details={"by_class": {name: mean for name, mean in means if not np.isnan(mean)}},
    )


def read_splits(data_dir: Path, config: DetectConfig) -> tuple[list[VocImage], list[VocImage]]:
    """The training images with objects, and all test images.

    Raises:
        ValueError: a file is missing or damaged, or there is nothing to find.
    """
    train = [
        image for split in config.train_splits for image in read_split(data_dir, split) if len(image.objects.boxes)
    ]
    test = read_split(data_dir, config.test_split)
    if all(image.objects.difficult.all() for image in test):
        raise ValueError(f"{config.test_split} has no objects to find: give another --test-split")
    return train, test


@dataclass(frozen=True)
class Batch:
    """This rank's part of a batch, on its device."""

    images: list[Tensor]
    """float32 [3, height, width], 0..1."""
    targets: list[dict[str, Tensor]]
    """The objects' boxes, edges float32 [n, 4], and labels int64 [n], from 1."""
    seed: int
    """Seed of the images' sizes and of the sampled regions."""


class _Loss(nn.Module):
    """This rank's part of the whole batch's loss."""

    def __init__(self, detector: nn.Module, config: DetectConfig, *, bfloat16: bool) -> None:
        super().__init__()
        self.detector, self._batch_size, self._bfloat16 = detector, config.batch_size, bfloat16

    def forward(self, batch: Batch) -> Tensor:
        torch.manual_seed(batch.seed)
        with torch.autocast(batch.images[0].device.type, torch.bfloat16, enabled=self._bfloat16):
            losses = self.detector(batch.images, batch.targets)
        return torch.stack([*losses.values()]).sum() * (len(batch.images) / self._batch_size)


def batches(
    images: Sequence[VocImage], config: DetectConfig, ranks: Ranks, first_step: int
) -> Generator[Batch, None, None]:
    """This rank's part of the batches from a step on, without an end: functions of the seed and the step alone."""

    def planned() -> Iterator[list[tuple[VocImage, bool]]]:
        for step, numbers in islice(enumerate(_orders(images, config)), first_step, None):
            flips = np.random.default_rng([config.seed, step]).integers(2, size=config.batch_size)
            batch = [(images[number], bool(flip)) for number, flip in zip(numbers, flips, strict=True)]
            yield batch[ranks.share(config.batch_size)]

    with closing(decoded_ahead(lambda each: example(*each), planned())) as decoded:
        for step, examples in enumerate(decoded, first_step):
            pixels, targets = zip(*examples, strict=True)
            yield Batch(
                images=[to_device(each, ranks.device).float() / 255 for each in pixels],
                targets=[{name: to_device(value, ranks.device) for name, value in each.items()} for each in targets],
                seed=int(np.random.default_rng([config.seed, step, ranks.rank, 1]).integers(2**62)),
            )


def _orders(images: Sequence[VocImage], config: DetectConfig) -> Iterator[list[int]]:
    """Numbers of the images of each batch: every image once in each random order.

    As in Detectron2, a batch has images that are all wider than high or all not, which saves padding.
    """
    waiting: tuple[list[int], list[int]] = ([], [])
    for epoch in count():
        for number in np.random.default_rng([config.seed, epoch]).permutation(len(images)).tolist():
            alike = waiting[images[number].width > images[number].height]
            alike.append(number)
            if len(alike) == config.batch_size:
                yield alike.copy()
                alike.clear()


def example(image: VocImage, is_flipped: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The pixels, uint8 [3, height, width], and objects of an image, or of its mirror image."""
    pixels, boxes = load_pixels(image), image.objects.boxes.astype(np.float32)
    if is_flipped:
        pixels = pixels[..., ::-1].copy()
        boxes = np.stack([image.width - boxes[:, 2], boxes[:, 1], image.width - boxes[:, 0], boxes[:, 3]], axis=1)
    return torch.from_numpy(pixels), {
        "boxes": torch.from_numpy(boxes),
        "labels": torch.from_numpy(image.objects.labels + 1),
    }


@torch.no_grad()
def detect_objects(
    detector: Any, images: Sequence[VocImage], config: DetectConfig, evaluation: Evaluation
) -> list[Detections]:
    """The detections on each image, in the image's own pixels; ranks share the work, and all have the result."""
    ranks = evaluation.ranks
    detector.eval()
    detector.transform.min_size = (config.test_side,)
    mine, found = images[ranks.share(len(images))], list[Detections]()
    with (
        closing(computed_ahead(map(load_pixels, mine), ahead=4, name="decode")) as loaded,
        evaluation.progress("detecting", len(mine)) as advance,
        torch.autocast(ranks.device.type, torch.bfloat16, enabled=evaluation.bfloat16),
    ):
        for pixels in loaded:
            (of_image,) = detector([to_device(torch.from_numpy(pixels), ranks.device).float() / 255])
            arrays = {name: of_image[name].double().cpu().numpy() for name in ("boxes", "scores")}
            found.append(Detections(labels=of_image["labels"].cpu().numpy() - 1, **arrays))
            advance()
    parts: list[list[Detections]] = [found] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(parts, found)
    return [each for part in parts for each in part]


def learning_rate_factor(config: DetectConfig, step: int) -> float:
    """Factor of the initial rate at a step, counted from 0: a linear warm-up and drops to a tenth."""
    warmth = min(1.0, step / config.warmup_iterations) if config.warmup_iterations else 1.0
    num_drops = sum(step >= drop for drop in config.learning_rate_drops)
    return float((_WARMUP_FACTOR * (1 - warmth) + warmth) * _DROP_FACTOR**num_drops)


def _parameter_groups(detector: nn.Module, config: DetectConfig) -> list[dict[str, object]]:
    """Parameters with weight decay, and those of BatchNorm without."""
    norms, others = list[nn.Parameter](), list[nn.Parameter]()
    for module in detector.modules():
        (norms if isinstance(module, _BatchNorm) else others).extend(module.parameters(recurse=False))
    return [{"params": others, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}]
