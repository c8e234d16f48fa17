"""Trains a segmentation network on random crops; resumable, with the same result on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data.pixels import PixelScale, normalise
from trainer.distributed import averaged_over_ranks
from trainer.evaluate.batch_norm import synchronise_batch_norm
from trainer.evaluate.labelled_crops import cosine
from trainer.evaluate.progress import Progress
from trainer.evaluate.segmentation.cityscapes import IGNORED, LabelledImage
from trainer.evaluate.segmentation.crops import CropBatches, RandomCrops
from trainer.evaluate.segmentation.network import upsample
from trainer.evaluate.training_state import load_state, save_state
from trainer.settings import Settings, check_at_least, check_not_negative, check_positive
from weightserver.torch import Ranks, to_device


@dataclass(frozen=True, kw_only=True)
class SegmentConfig(Settings):
    """Settings of the segmentation protocol; the defaults are the paper's (appendix, Experimental Settings)."""

    iterations: int = 60_000
    """Updates of the network."""
    batch_size: int = 8
    """Crops in each update, on all ranks together."""
    crop_size: int = 769
    """Side of a training crop, in pixels."""
    min_scale: float = 0.5
    """Smallest factor by which a training image is scaled."""
    max_scale: float = 2.0
    """Largest factor by which a training image is scaled."""
    learning_rate: float = 0.01
    """Initial learning rate; it falls to 0 by a cosine."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay, on all parameters."""
    seed: int = 0
    """Seed of the initial head, the order of images and their crops."""
    checkpoint_every: int = 1_000
    """Iterations after which the state is saved, so that an interrupted evaluation resumes there."""

    def check(self) -> None:
        check_at_least(self, 1, "iterations", "batch_size", "crop_size", "checkpoint_every")
        check_positive(self, "min_scale", "max_scale", "learning_rate")
        check_not_negative(self, "momentum", "weight_decay")
        if self.min_scale > self.max_scale:
            raise ValueError(f"--min-scale {self.min_scale} is above --max-scale {self.max_scale}: exchange them")


class Trainer:
    """Trains a network on the ranks, each with its part of every batch.

    Args:
        network: normalised images to the logits of `FCN`; trained in place, on the device of its rank.
        identity: identifies network and images; the state of others is not resumed.

    Raises:
        ValueError: a batch has fewer images than there are ranks.
    """

    def __init__(
        self,
        network: nn.Module,
        pixels: PixelScale,
        images: Sequence[LabelledImage],
        config: SegmentConfig,
        ranks: Ranks,
        *,
        identity: str,
        bfloat16: bool = False,
    ) -> None:
        if config.batch_size < ranks.world_size:
            raise ValueError(f"--batch-size {config.batch_size} leaves some of {ranks.world_size} ranks without images")
        self._pixels, self._config, self._ranks = pixels, config, ranks
        self._identity, self._bfloat16 = identity, bfloat16
        self._batches = CropBatches(
            images=images,
            crops=RandomCrops(
                side=config.crop_size,
                scales=(config.min_scale, config.max_scale),
                fill=tuple(round(255 * mean) for mean in pixels.channels(3).mean),
            ),
            batch_size=config.batch_size,
            share=ranks.share(config.batch_size),
            seed=config.seed,
        )
        self.network = synchronise_batch_norm(network.to(ranks.device), ranks)
        """The trained network."""
        self._parallel = averaged_over_ranks(self.network, ranks)
        self._optimizer = torch.optim.SGD(
            self.network.parameters(),
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )

    def train(self, state_file: Path | None, progress: Progress) -> None:
        """Trains to the end, from the state in `state_file` if there is one.

        Raises:
            ValueError: the state is that of other settings, or damaged; an image is damaged; the training diverges.
        """
        config = self._config
        first = load_state(state_file, self.network, self._optimizer, self._described()) if state_file else 0
        self._parallel.train()
        steps = range(first, config.iterations)
        with progress("training", config.iterations) as advance, closing(self._batches.ahead(steps)) as batches:
            advance(first)
            for step, (pixels, labels) in zip(steps, batches, strict=True):
                loss = self._step(pixels, labels, step)
                num_steps = step + 1
                saved = num_steps % config.checkpoint_every == 0 or num_steps == config.iterations
                if saved and state_file and self._ranks.is_first:
                    save_state(state_file, self.network, self._optimizer, num_steps, self._described())
                advance(1, loss=torch.tensor(loss))

    def _step(self, pixels: Tensor, labels: Tensor, step: int) -> float:
        """One update by the mean loss over the labelled pixels of all ranks; returns that loss."""
        config, device = self._config, self._ranks.device
        self._optimizer.param_groups[0]["lr"] = config.learning_rate * cosine(step / config.iterations)
        num_labelled = max(1.0, self._ranks.sum_over_ranks([float((labels != IGNORED).sum())])[0])
        images = normalise(to_device(pixels, device), self._pixels)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bfloat16):
            logits = self._parallel(images.contiguous(memory_format=torch.channels_last))
        upsampled = upsample(logits.float(), *labels.shape[-2:])
        wanted = to_device(labels, device).long()
        loss = F.cross_entropy(upsampled, wanted, ignore_index=IGNORED, reduction="sum") / num_labelled
        self._optimizer.zero_grad()
        (loss * self._ranks.world_size).backward()  # type: ignore[no-untyped-call]  # ranks' gradients are averaged
        self._optimizer.step()
        (total,) = self._ranks.sum_over_ranks([loss.item()])
        if not math.isfinite(total):
            raise ValueError(f"the loss is {total} in iteration {step + 1}: give a lower --learning-rate")
        return total

    def _described(self) -> str:
        """What a state must have in common with this training to be resumed."""
        settings = asdict(self._config) | {"identity": self._identity, "bfloat16": self._bfloat16}
        del settings["checkpoint_every"]
        return json.dumps(settings, sort_keys=True)
