"""Semantic segmentation on Cityscapes by a fully convolutional network (paper, appendix; He et al., 1911.05722).

All layers are trained, from the encoder's weights. Validation images are segmented whole, at their own size.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.paper.cityscapes import (
    IGNORED,
    NUM_CLASSES,
    LabelledImage,
    class_names,
    list_split,
    read_pair,
)
from experiments.paper.crops import RandomCrops, crops_ahead
from experiments.paper.fcn import FCN, upsample
from experiments.paper.resnet import resnet_stages
from experiments.paper.settings import SegmentConfig
from trainer.data.pixels import PixelScale, normalise
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.training import Training, check_batch, cosine
from trainer.torchvision_schemas import import_module
from weightserver.torch import to_device


def segment(evaluation: Evaluation, config: SegmentConfig) -> Outcome:
    """Trains a segmentation network on the fine training set, and evaluates it on the validation set.

    The result does not depend on the number of ranks, up to rounding: each takes its part of every batch and of the
    validation images, and BatchNorm uses the whole batch. A damaged file ends the evaluation when it is read; after the
    training, whose state is saved, it continues once the file is restored.

    Raises:
        ValueError: the encoder is not a ResNet, or a batch has fewer images than there are ranks.
        ValueError: a folder, image or label is missing or damaged, or the loss is not finite.
    """
    encoder, encoder_config = evaluation.encoder.require_encoder("segment")
    directory = evaluation.folder("the folder of Cityscapes, with leftImg8bit and gtFine")
    ranks, pixels = evaluation.ranks, encoder_config.pixels
    stages = resnet_stages(encoder, encoder_config)
    train_images, val_images = list_split(directory, "train"), list_split(directory, "val")
    check_batch(config.batch_size, config.batch_size, ranks)  # images may repeat in a batch
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = FCN(stages, NUM_CLASSES).to(ranks.device)
    crops = RandomCrops(
        side=config.crop_size,
        scales=(config.min_scale, config.max_scale),
        fill=tuple(round(255 * mean) for mean in pixels.channels(3).mean),
    )

    def batches(first_step: int) -> Generator[tuple[Tensor, Tensor], None, None]:
        return crops_ahead(
            train_images, crops, config.batch_size, ranks, seed=config.seed, steps=range(first_step, config.iterations)
        )

    def loss_of(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean over the labelled pixels of all ranks."""
        views, labels = batch
        (num_labelled,) = ranks.sum_over_ranks([float((labels != IGNORED).sum())])
        upsampled = upsample(_logits(network, views, pixels, evaluation), *labels.shape[-2:])
        wanted = to_device(labels, ranks.device).long()
        return F.cross_entropy(upsampled, wanted, ignore_index=IGNORED, reduction="sum") / max(1.0, num_labelled)

    optimizer = torch.optim.SGD(
        network.parameters(), lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )
    training = Training(
        evaluation, network, optimizer, loss_of=loss_of, factor=lambda step: cosine(step / config.iterations)
    )
    training.run("network", batches, num_steps=config.iterations, save_every=config.save_every)
    iou = intersection_over_union(network, val_images, pixels, evaluation)
    occurs = ~iou.isnan()
    by_class = zip(class_names(), iou.tolist(), occurs.tolist(), strict=True)
    details = {
        "iou": {name: value if seen else None for name, value, seen in by_class},
        "num_train_images": len(train_images),
        "num_val_images": len(val_images),
    }
    return Outcome(results={"miou": iou[occurs].mean().item()}, details=details)


@torch.no_grad()
def intersection_over_union(
    network: nn.Module, images: Sequence[LabelledImage], pixels: PixelScale, evaluation: Evaluation
) -> Tensor:
    """Percentages of each class over the images of all ranks; NaN for a class that no pixel has or is taken for."""
    ranks = evaluation.ranks
    network.eval()
    confusion = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.int64)
    library = import_module("torchmetrics.functional.classification")
    with evaluation.progress("validation", len(images)) as advance:
        for pair in images[ranks.share(len(images))]:
            image, of_pixels = read_pair(pair)
            view, labels = torch.from_numpy(np.array(image)).permute(2, 0, 1), torch.from_numpy(of_pixels).long()
            logits = upsample(_logits(network, view[None], pixels, evaluation), *view.shape[1:])[0]
            confusion += library.multiclass_confusion_matrix(
                logits.argmax(dim=0).cpu(), labels, NUM_CLASSES, ignore_index=IGNORED, validate_args=False
            )
            advance(ranks.world_size)
    sums = ranks.sum_over_ranks(confusion.flatten().tolist())
    counts = torch.tensor(sums, dtype=torch.float64).view(NUM_CLASSES, NUM_CLASSES)
    correct = counts.diagonal()
    return 100 * correct / (counts.sum(dim=0) + counts.sum(dim=1) - correct)


def _logits(network: nn.Module, views: Tensor, pixels: PixelScale, evaluation: Evaluation) -> Tensor:
    """Logits float32 of images uint8 [B, 3, H, W]."""
    device = evaluation.ranks.device
    images = normalise(to_device(views, device), pixels).contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.type, torch.bfloat16, enabled=evaluation.bfloat16):
        logits: Tensor = network(images)
    return logits.float()
