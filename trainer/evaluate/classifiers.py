"""Classifiers on an encoder's features, trained on random crops of labelled images and tested on centre crops.

The one engine of linear classification, semi-supervised classification and fine-tuning.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import closing

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data import TrainImages
from trainer.data.augment import Augmentation, AugmentationConfig
from trainer.data.pixels import normalise
from trainer.data.prefetch import Visits, views_ahead
from trainer.evaluate.evaluation import Evaluation
from trainer.evaluate.features import Frozen, centres
from trainer.evaluate.protocol import num_correct
from trainer.evaluate.settings import TrainingConfig
from trainer.evaluate.training import Training, check_batch, cosine
from trainer.schedule import visit_uniforms
from weightserver.torch import to_device

CROPS = AugmentationConfig(strong=False, min_scale=0.08)
"""torchvision's RandomResizedCrop with its defaults, and a flip."""
_TEST_BATCH = 256
_TOP = 5
_INIT_STD = 0.01

Accuracy = tuple[float, float]
"""Top-1 and top-5 in percent."""


class CosineClassifier(nn.Module):
    """Logits cos(w_c, z) / τ [B, num_classes] of features z [B, d] (Equation 1 of the paper)."""

    def __init__(self, dim: int, num_classes: int, temperature: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, dim))
        self.temperature = temperature

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(F.normalize(features), F.normalize(self.weight)) / self.temperature


class Classifiers:
    """New classifiers on an encoder, trained on the training images `ids` (int64 [n]) of the evaluation's data set.

    All ranks take a part of every batch, so that their number changes the result by rounding only.

    Args:
        epochs: passes over these images.
        learning_rates: of each classifier; an encoder that is trained has the first one's.
        temperature: of a cosine classifier; None for a linear one.
        frozen: the encoder, to train none; otherwise a copy of the evaluation's encoder is trained with the classifier.

    Raises:
        ValueError: fewer images than a batch, or fewer images in a batch than ranks.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        ids: Tensor,
        config: TrainingConfig,
        learning_rates: Sequence[float],
        *,
        epochs: int,
        temperature: float | None = None,
        frozen: Frozen | None = None,
    ) -> None:
        check_batch(len(ids), config.batch_size, evaluation.ranks)
        self._dataset, self._ranks, self._frozen = evaluation.labelled(), evaluation.ranks, frozen
        self._ids, self._config, self._epochs, self._evaluation = ids, config, epochs, evaluation
        self._side, self._pixels = self._dataset.evaluated_side, evaluation.encoder.pixels
        device = self._ranks.device
        encoder = None if frozen else copy.deepcopy(evaluation.encoder.network).to(device).eval()
        heads = self._heads(frozen or encoder, len(learning_rates), temperature)
        network = _Network(encoder, heads, bfloat16=evaluation.bfloat16)
        self._network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained = [*heads, encoder] if encoder else heads
        rates = [*learning_rates, learning_rates[0]]
        groups = [{"params": [*part.parameters()], "lr": rate} for part, rate in zip(trained, rates, strict=False)]
        num_steps = epochs * self.steps_per_epoch
        self.training = Training(
            evaluation,
            self._network,
            torch.optim.SGD(groups, lr=rates[0], momentum=config.momentum, weight_decay=config.weight_decay),
            loss_of=self._loss,
            factor=lambda step: cosine(step / num_steps),
        )

    @property
    def steps_per_epoch(self) -> int:
        return len(self._ids) // self._config.batch_size

    def train(self, name: str) -> None:
        """Trains to the end, shown by `name`; continues after the last whole epoch if it was interrupted."""
        steps = self.steps_per_epoch
        self.training.run(name, self._batches, num_steps=self._epochs * steps, save_every=steps)

    def tested(self) -> list[Accuracy]:
        """Accuracies of each classifier on the test images."""
        data = self._dataset
        return self._accuracies("test images", data.test_images, torch.arange(len(data.test_images)), data.test_labels)

    def held_out(self, ids: Tensor) -> list[Accuracy]:
        """Accuracies of each classifier on the training images `ids` (int64 [n])."""
        data = self._dataset
        return self._accuracies("held-out images", data.train_images, ids, data.train_labels[ids])

    @property
    def finite(self) -> list[bool]:
        """Whether the weights of each classifier are finite: those of one that diverges are not."""
        heads = self._network.heads
        return [all(bool(weight.isfinite().all()) for weight in head.parameters()) for head in heads]

    @torch.no_grad()
    def _accuracies(self, name: str, images: TrainImages, ids: Tensor, labels: Tensor) -> list[Accuracy]:
        """Accuracies by centre crops of images `ids` of classes `labels`; each rank classifies a part of them."""
        self._network.eval()
        mine = self._ranks.share(len(ids))
        batches = centres(images, self._side, ids[mine], _TEST_BATCH)
        counts = torch.zeros(len(self._network.heads), 2, dtype=torch.float64)
        with self._evaluation.progress(name, len(ids)) as advance:
            for batch, wanted in zip(batches, torch.split(labels[mine], _TEST_BATCH), strict=True):
                logits = self._network(self._inputs(normalise(to_device(batch, self._ranks.device), self._pixels)))
                for count, each in zip(counts, logits, strict=True):
                    count += num_correct(each.topk(min(_TOP, each.shape[1])).indices, wanted)
                advance(len(batch) * self._ranks.world_size)
        sums = self._ranks.sum_over_ranks(counts.flatten().tolist())
        shares = [100 * number / max(1, len(ids)) for number in sums]
        return list(zip(shares[::2], shares[1::2], strict=True))

    @torch.no_grad()
    def _heads(self, encoder: nn.Module | Frozen | None, number: int, temperature: float | None) -> list[nn.Module]:
        """So many classifiers of the encoder's features, whose initial weights depend on the seed alone."""
        data = self._dataset
        (first,) = centres(data.train_images, self._side, torch.tensor([0]), 1)
        assert encoder is not None
        dim = encoder(normalise(to_device(first, self._ranks.device), self._pixels)).flatten(1).shape[1]
        num_classes = int(torch.cat([data.train_labels, data.test_labels]).max()) + 1
        generator = torch.Generator().manual_seed(self._config.seed)
        weight = torch.randn(num_classes, dim, generator=generator) * _INIT_STD
        heads: list[nn.Module] = []
        for _ in range(number):
            head = CosineClassifier(dim, num_classes, temperature) if temperature else nn.Linear(dim, num_classes)
            head.load_state_dict({"weight": weight} | ({} if temperature else {"bias": torch.zeros(num_classes)}))
            heads.append(head)
        return heads

    def _batches(self, first_step: int) -> Generator[tuple[Tensor, Tensor], None, None]:
        """This rank's views of crops, float32 [b, C, H, W], and their labels, int64 [b]."""
        data, ranks = self._dataset, self._ranks
        augment = Augmentation(CROPS, self._side or data.train_images.shape[-1], self._pixels)
        images = data.train_images.to(ranks.device)
        for epoch in range(first_step // self.steps_per_epoch, self._epochs):
            batches = self._visits(epoch)
            with closing(views_ahead(images, batches, [augment], ranks.device)) as views:
                for batch, view in zip(batches, views, strict=True):
                    yield view, data.train_labels[batch.images]

    def _visits(self, epoch: int) -> list[Visits]:
        """This rank's part of each batch of an epoch, in a random order; images that fill no batch are omitted."""
        ids, size, seed = self._ids, self._config.batch_size, self._config.seed
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = ids[torch.randperm(len(ids), generator=generator)].numpy()
        mine, batches = self._ranks.share(size), []
        for start in range(0, len(ids) // size * size, size):
            places = np.arange(start + mine.start, start + mine.stop)
            uniforms = visit_uniforms(seed, epoch * len(order) + places[None], Augmentation.num_uniforms)
            batches.append(Visits(order[places], uniforms))  # [b], [1, b, num_uniforms]
        return batches

    def _loss(self, network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of each classifier, the whole batch's mean."""
        view, labels = batch
        labels = to_device(labels, view.device)
        losses = [F.cross_entropy(logits, labels, reduction="sum") for logits in network(self._inputs(view))]
        return torch.stack(losses) / self._config.batch_size

    def _inputs(self, views: Tensor) -> Tensor:
        """What the trained network takes: the views, or a frozen encoder's features of them."""
        return self._frozen(views) if self._frozen is not None else views


class _Network(nn.Module):
    """Logits float32 [B, num_classes] of each classifier, of normalised images, or of features without an encoder."""

    def __init__(self, encoder: nn.Module | None, heads: Sequence[nn.Module], *, bfloat16: bool) -> None:
        super().__init__()
        self.encoder, self.heads, self._bfloat16 = encoder, nn.ModuleList(heads), bfloat16

    def forward(self, inputs: Tensor) -> list[Tensor]:
        if self.encoder is not None:
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self._bfloat16):
                inputs = self.encoder(inputs.contiguous(memory_format=torch.channels_last))
        features = inputs.float().flatten(1)
        return [head(features) for head in self.heads]
