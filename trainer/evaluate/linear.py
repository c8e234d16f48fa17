"""Linear classification on frozen features of random crops (paper, section 4; He et al., 1911.05722).

The encoder stays in eval mode and without gradients. Every learning rate trains a head of its own on the same features,
so that several cost little more than one.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data import Dataset, TrainImages
from trainer.data.augment import Augmentation
from trainer.data.prefetch import views_ahead
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.frozen import Frozen, centres
from trainer.evaluate.labelled_crops import CROPS, accuracies, batches_of_epoch, check_batch, check_loss, cosine
from trainer.evaluate.progress import Advance
from trainer.evaluate.protocol import split_held_out
from trainer.evaluate.training_state import load_state, save_state
from trainer.settings import Settings, check_at_least, check_not_negative
from weightserver.torch import Ranks

_INIT_STD = 0.01


@dataclass(frozen=True, kw_only=True)
class LinearConfig(Settings):
    """Settings of the linear protocol; the defaults are the paper's."""

    learning_rates: tuple[float, ...] = (30.0,)
    """One head is trained for each. Of several, held-out training images choose."""
    epochs: int = 100
    """Passes over the training images."""
    batch_size: int = 256
    """Images in a step, of all ranks together."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay of SGD."""
    seed: int = 0
    """Seed of the crops, the order of images and the heads' initial weights."""

    def check(self) -> None:
        if not self.learning_rates or not all(0 < rate < math.inf for rate in self.learning_rates):
            raise ValueError(f"--learning-rates is {self.learning_rates}: give one or more, positive and finite")
        check_at_least(self, 1, "epochs", "batch_size")
        check_not_negative(self, "momentum", "weight_decay")


def linear(evaluation: Evaluation, config: LinearConfig) -> Outcome:
    """Trains linear heads on the encoder's features of the training images and tests the best on centre crops.

    The result does not depend on the number of ranks, up to rounding: each takes its part of every batch and of the
    test images. An interrupted evaluation continues after its last whole epoch.

    Raises:
        ValueError: images without labels, or fewer of them than a batch.
    """
    dataset, ranks = evaluation.load(), evaluation.ranks
    dataset.check_labelled(tested=True)
    num_images = len(dataset.train_images)
    fitted, held_out = torch.arange(num_images), torch.empty(0, dtype=torch.int64)
    if len(config.learning_rates) > 1:
        fitted, held_out = split_held_out(num_images)
    check_batch(len(fitted), config.batch_size, ranks)
    frozen = Frozen(evaluation.subject.network, evaluation.subject.pixels, ranks.device, bfloat16=evaluation.bfloat16)
    num_classes = int(torch.cat([dataset.train_labels, dataset.test_labels]).max()) + 1
    probe = LinearHeads(frozen, dataset, fitted, num_classes, config, ranks)
    with evaluation.progress("linear", config.epochs * probe.steps_per_epoch) as advance:
        probe.train(evaluation.state / "heads.safetensors", advance)
    best, chosen = 0, {}
    if len(held_out):
        labels = dataset.train_labels[held_out]
        with evaluation.progress("held-out images", len(held_out)) as advance:
            shares = [top1 for top1, _ in probe.accuracies(dataset.train_images, held_out, labels, advance)]
        best = max(range(len(shares)), key=lambda head: shares[head])  # the first of equals
        chosen = {
            "learning_rate": config.learning_rates[best],
            "held_out_top1": shares[best],
            "on": f"{len(held_out)} training images that no head was trained on",
        }
    tested = torch.arange(len(dataset.test_images))
    with evaluation.progress("test images", len(tested)) as advance:
        top1, top5 = probe.accuracies(dataset.test_images, tested, dataset.test_labels, advance)[best]
    frozen.check()
    return Outcome(results={"top1": top1, "top5": top5}, chosen=chosen)


class LinearHeads:
    """Heads, one for each learning rate, and their training."""

    def __init__(
        self, frozen: Frozen, dataset: Dataset, fitted: Tensor, num_classes: int, config: LinearConfig, ranks: Ranks
    ) -> None:
        self._frozen, self._config, self._ranks = frozen, config, ranks
        self._images = dataset.train_images.to(ranks.device)
        self._labels, self._fitted = dataset.train_labels, fitted
        self._side = dataset.evaluated_side
        self._image_size = dataset.evaluated_side or dataset.train_images.shape[-1]
        (first,) = centres(dataset.train_images, self._side, torch.tensor([0]), 1)
        dim = frozen.of_pixels(first).shape[1]
        generator = torch.Generator().manual_seed(config.seed)
        weight = torch.randn(num_classes, dim, generator=generator) * _INIT_STD
        heads = [nn.Linear(dim, num_classes) for _ in config.learning_rates]
        for head in heads:
            with torch.no_grad():
                head.weight.copy_(weight)
                head.bias.zero_()
        self._heads = nn.ModuleList(heads).to(ranks.device)
        self._optimizer = torch.optim.SGD(
            [
                {"params": list(head.parameters()), "lr": rate}
                for head, rate in zip(self._heads, config.learning_rates, strict=True)
            ],
            lr=config.learning_rates[0],
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )

    @property
    def steps_per_epoch(self) -> int:
        return len(self._fitted) // self._config.batch_size

    def train(self, state_file: Path, advance: Advance) -> None:
        """Trains all heads to the end; continues from `state_file` if it exists."""
        first_epoch = load_state(state_file, self._heads, self._optimizer)
        augment = Augmentation(CROPS, self._image_size, self._frozen.pixels)
        num_steps = self._config.epochs * self.steps_per_epoch
        step = first_epoch * self.steps_per_epoch
        advance(step)
        for epoch in range(first_epoch, self._config.epochs):
            batches = batches_of_epoch(
                self._fitted, self._config.batch_size, seed=self._config.seed, epoch=epoch, ranks=self._ranks
            )
            with closing(views_ahead(self._images, batches, [augment], self._ranks.device)) as views:
                for batch, view in zip(batches, views, strict=True):
                    loss = self.step(view, self._labels[batch.images], step / num_steps)
                    step += 1
                    advance(loss=loss)
            check_loss(loss, epoch)
            if self._ranks.is_first:
                save_state(state_file, self._heads, self._optimizer, epoch + 1)

    def step(self, view: Tensor, labels: Tensor, progress: float) -> Tensor:
        """One update of every head by the whole batch's mean loss, at its rate after a part `progress` of all steps."""
        for group, rate in zip(self._optimizer.param_groups, self._config.learning_rates, strict=True):
            group["lr"] = rate * cosine(progress)
        features, labels = self._frozen(view), labels.to(view.device)
        losses = [F.cross_entropy(head(features), labels, reduction="sum") for head in self._heads]
        self._optimizer.zero_grad()
        (torch.stack(losses).sum() / self._config.batch_size).backward()  # type: ignore[no-untyped-call]
        if self._ranks.world_size > 1:
            for parameter in self._heads.parameters():
                dist.all_reduce(parameter.grad)
        self._optimizer.step()
        return torch.stack(losses).detach().mean() / len(labels)

    def accuracies(
        self, images: TrainImages, ids: Tensor, labels: Tensor, advance: Advance
    ) -> list[tuple[float, float]]:
        """Top-1 and top-5 of each head in percent."""

        @torch.no_grad()
        def classify(batch: Tensor) -> list[Tensor]:
            features = self._frozen.of_pixels(batch)
            return [head(features) for head in self._heads]

        return accuracies(classify, images, ids, labels, self._side, self._ranks, advance)
