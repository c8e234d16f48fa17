"""Trains a detector on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.data.pixels import PixelScale
from trainer.distributed import averaged_over_ranks
from trainer.evaluate.batch_norm import synchronise_batch_norm
from trainer.evaluate.detection.batch_norm import averaged_statistics
from trainer.evaluate.detection.batches import Batch, batches, visits
from trainer.evaluate.detection.config import DetectConfig
from trainer.evaluate.detection.network import FasterRCNN, Losses
from trainer.evaluate.detection.voc import VocImage
from trainer.evaluate.progress import Progress
from trainer.evaluate.training_state import load_state, save_state
from weightserver.torch import Ranks

_WARMUP_FACTOR = 0.001
_DROP_FACTOR = 0.1


class DetectorTraining:
    """The training of a detector by all ranks together; its results depend on their number only by rounding.

    Each rank takes its part of every batch, padded like the whole batch. BatchNorm's statistics are those of the whole
    batch, and losses are divided by the numbers of anchors and regions of the whole batch.
    """

    def __init__(
        self, detector: FasterRCNN, pixels: PixelScale, config: DetectConfig, ranks: Ranks, *, bfloat16: bool = False
    ) -> None:
        if config.batch_size < ranks.world_size:
            raise ValueError(
                f"a batch of {config.batch_size} images has none for some of {ranks.world_size} ranks: "
                "give a larger --batch-size or start fewer ranks"
            )
        self._config, self._ranks, self._pixels, self._bfloat16 = config, ranks, pixels, bfloat16
        self.detector = synchronise_batch_norm(detector.to(ranks.device), ranks)
        self._parallel = averaged_over_ranks(self.detector, ranks)
        self._optimizer = torch.optim.SGD(_parameter_groups(self.detector, config), momentum=config.momentum)

    def train(self, images: Sequence[VocImage], state_file: Path | None, progress: Progress) -> None:
        """Trains to the end, from the state of an interrupted training with these settings if there is one.

        Raises:
            ValueError: the loss is not finite, or a training image cannot be decoded.
        """
        config, identity = self._config, json.dumps(asdict(self._config), default=str)
        step = load_state(state_file, self.detector, self._optimizer, identity) if state_file else 0
        self.detector.train()
        planned = islice(visits(images, config, step), config.iterations - step)
        with (
            closing(batches(planned, self._pixels, self._ranks)) as loaded,
            progress("training", config.iterations) as advance,
        ):
            advance(step)
            for batch in loaded:
                loss = self._step(batch, step)
                step += 1
                if state_file and self._ranks.is_first and (step % config.save_every == 0 or step == config.iterations):
                    save_state(state_file, self.detector, self._optimizer, step, identity)
                advance(loss=torch.tensor(loss))

    def measure_norms(self, images: Sequence[VocImage], progress: Progress) -> None:
        """Replaces BatchNorm's running averages by averages over further training batches."""
        config = self._config
        if not config.precise_norm_batches:
            return
        self.detector.train()
        planned = islice(visits(images, config, config.iterations), config.precise_norm_batches)
        with (
            torch.no_grad(),
            averaged_statistics(self.detector),
            closing(batches(planned, self._pixels, self._ranks)) as loaded,
            progress("averaging statistics", config.precise_norm_batches) as advance,
        ):
            for batch in loaded:
                self._forward(self.detector, batch)
                advance()

    def _step(self, batch: Batch, step: int) -> float:
        """One update by a whole batch's mean loss; returns the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._config, step)
        losses = self._forward(self._parallel, batch)
        num_anchors = self._config.batch_size * self._config.anchors_per_image
        anchors, regions, num_regions = self._ranks.sum_over_ranks(
            [losses.anchors.item(), losses.regions.item(), float(losses.num_regions)]
        )
        loss = anchors / num_anchors + regions / num_regions
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {step + 1} is {loss}: give a lower --learning-rate")
        self._optimizer.zero_grad()
        share = losses.anchors / num_anchors + losses.regions / num_regions
        (share * self._ranks.world_size).backward()  # type: ignore[no-untyped-call]  # ranks' gradients are averaged
        self._optimizer.step()
        return loss

    def _forward(self, network: nn.Module, batch: Batch) -> Losses:
        with torch.autocast(self._ranks.device.type, torch.bfloat16, enabled=self._bfloat16):
            return cast(Losses, network(batch.images, batch.sizes, batch.targets))


def learning_rate(config: DetectConfig, step: int) -> float:
    """The rate of a step, counted from 0: a linear warm-up and drops to a tenth."""
    warmth = min(1.0, step / config.warmup_iterations) if config.warmup_iterations else 1.0
    num_drops = sum(step >= drop for drop in config.learning_rate_drops)
    return config.learning_rate * (_WARMUP_FACTOR * (1 - warmth) + warmth) * _DROP_FACTOR**num_drops


def _parameter_groups(detector: nn.Module, config: DetectConfig) -> list[dict[str, object]]:
    """Parameters with weight decay, and those of BatchNorm without."""
    norms, others = list[nn.Parameter](), list[nn.Parameter]()
    for module in detector.modules():
        is_norm = isinstance(module, _BatchNorm)
        (norms if is_norm else others).extend(module.parameters(recurse=False))
    return [{"params": others, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}]
