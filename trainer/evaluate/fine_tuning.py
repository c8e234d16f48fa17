"""Training of a whole encoder with a classifier on labelled images, by SGD with a cosine schedule and no warm-up."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data import Dataset, TrainImages
from trainer.data.augment import Augmentation
from trainer.data.pixels import normalise
from trainer.data.prefetch import views_ahead
from trainer.distributed import averaged_over_ranks
from trainer.evaluate.batch_norm import synchronise_batch_norm
from trainer.evaluate.evaluation import Evaluation
from trainer.evaluate.frozen import centres
from trainer.evaluate.labelled_crops import CROPS, accuracies, batches_of_epoch, check_batch, check_loss, cosine
from trainer.evaluate.progress import Advance
from trainer.evaluate.training_state import load_state, save_state
from trainer.settings import Settings, check_at_least, check_not_negative, check_positive
from weightserver.torch import to_device


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """One training of encoder and classifier."""

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    temperature: float | None = None
    """Of the cosine classifier; None for a linear one."""
    seed: int

    def check(self) -> None:
        check_at_least(self, 1, "epochs", "batch_size")
        check_positive(self, "learning_rate")
        check_not_negative(self, "momentum", "weight_decay")


class CosineClassifier(nn.Module):
    """Logits cos(w_c, z) / τ [B, num_classes] of features z [B, d] (Equation 1 of the paper)."""

    def __init__(self, dim: int, num_classes: int, temperature: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, dim))
        self.temperature = temperature

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(F.normalize(features), F.normalize(self.weight)) / self.temperature


class FineTuning:
    """An encoder with a new classifier, trained on the images `ids` of a data set's training images.

    All ranks take a part of every batch; BatchNorm uses the whole batch, so that the result does not depend on the
    number of ranks, up to rounding.

    Raises:
        ValueError: fewer images than a batch.
    """

    def __init__(self, evaluation: Evaluation, dataset: Dataset, ids: Tensor, num_classes: int, recipe: Recipe) -> None:
        recipe.check()
        check_batch(len(ids), recipe.batch_size, evaluation.ranks)
        self._recipe, self._ranks, self._bfloat16 = recipe, evaluation.ranks, evaluation.bfloat16
        self._progress = evaluation.progress
        self._ids, self._labels, self._side = ids, dataset.train_labels, dataset.evaluated_side
        self._images = dataset.train_images.to(self._ranks.device)
        self._image_size = dataset.evaluated_side or dataset.train_images.shape[-1]
        self._pixels = evaluation.subject.pixels
        self._network = self._built(evaluation.subject.network, num_classes)
        self._parallel = averaged_over_ranks(self._network, self._ranks)
        self._optimizer = torch.optim.SGD(
            self._network.parameters(),
            lr=recipe.learning_rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )

    @property
    def num_steps(self) -> int:
        return self._recipe.epochs * self._steps_per_epoch

    @property
    def _steps_per_epoch(self) -> int:
        return len(self._ids) // self._recipe.batch_size

    def _built(self, encoder: nn.Module, num_classes: int) -> nn.Module:
        """A copy of the encoder and a classifier whose initial weights depend on the seed alone."""
        encoder = copy.deepcopy(encoder).eval()
        (first,) = centres(self._images, self._side, torch.tensor([0]), 1)
        with torch.no_grad():
            dim = encoder.cpu()(normalise(first.cpu(), self._pixels)).shape[1]
        temperature = self._recipe.temperature
        classifier = CosineClassifier(dim, num_classes, temperature) if temperature else nn.Linear(dim, num_classes)
        generator = torch.Generator().manual_seed(self._recipe.seed)
        with torch.no_grad():
            classifier.weight.copy_(torch.randn(num_classes, dim, generator=generator) * 0.01)
            if isinstance(classifier, nn.Linear):
                classifier.bias.zero_()
        network = nn.Sequential(encoder, classifier).to(self._ranks.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return synchronise_batch_norm(network, self._ranks)

    def train(self, state_file: Path, advance: Advance) -> None:
        """Trains to the end; continues after the last whole epoch if `state_file` exists."""
        augment = Augmentation(CROPS, self._image_size, self._pixels)
        first_epoch = load_state(state_file, self._network, self._optimizer)
        step = first_epoch * self._steps_per_epoch
        advance(step)
        for epoch in range(first_epoch, self._recipe.epochs):
            self._network.train()
            batches = batches_of_epoch(
                self._ids, self._recipe.batch_size, seed=self._recipe.seed, epoch=epoch, ranks=self._ranks
            )
            with closing(views_ahead(self._images, batches, [augment], self._ranks.device)) as views:
                for batch, view in zip(batches, views, strict=True):
                    loss = self._step(view, self._labels[batch.images], step / self.num_steps)
                    step += 1
                    advance(loss=loss)
            check_loss(loss, epoch)
            if self._ranks.is_first:
                save_state(state_file, self._network, self._optimizer, epoch + 1)
        self._ranks.barrier()

    def _step(self, view: Tensor, labels: Tensor, progress: float) -> Tensor:
        """One update by the whole batch's mean loss, at the learning rate after a part `progress` of all steps."""
        self._optimizer.param_groups[0]["lr"] = self._recipe.learning_rate * cosine(progress)
        logits = self._logits(self._parallel, view)
        loss = F.cross_entropy(logits, to_device(labels, view.device), reduction="sum")
        self._optimizer.zero_grad()
        # gradients are averaged over ranks: their number makes that a sum
        (loss * self._ranks.world_size / self._recipe.batch_size).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach() / len(labels)

    def accuracies(self, images: TrainImages, ids: Tensor, labels: Tensor, name: str) -> tuple[float, float]:
        """Top-1 and top-5 in percent, by centre crops of images `ids`; progress is shown by `name`."""
        self._network.eval()

        @torch.no_grad()
        def classify(batch: Tensor) -> list[Tensor]:
            return [self._logits(self._network, normalise(to_device(batch, self._ranks.device), self._pixels))]

        with self._progress(name, len(ids)) as advance:
            (found,) = accuracies(classify, images, ids, labels, self._side, self._ranks, advance)
        return found

    def _logits(self, network: nn.Module, views: Tensor) -> Tensor:
        with torch.autocast(views.device.type, torch.bfloat16, enabled=self._bfloat16):
            logits: Tensor = network(views.contiguous(memory_format=torch.channels_last))
        return logits.float()
