"""The methods that are compared with PIC: each a module whose state is all that its training changes.

`forward` takes V views of b images, float32 (b, C, side, side) each, and the images' numbers, int64 (b,); it returns
the loss. Keyword-only arguments of the constructors are the methods' own settings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data import Dataset
from trainer.model import PICModel
from trainer.torchvision_schemas import import_module

DIET_LABEL_SMOOTHING = 0.8


@dataclass(frozen=True)
class Task:
    """What a method learns from."""

    dataset: Dataset
    batch_size: int
    """B, images in each update."""
    dim: int
    """D, length of an embedding."""

    @property
    def num_images(self) -> int:
        """N."""
        return len(self.dataset.train_images)


class Method(nn.Module):
    """One method's networks and losses. Built on the model's device, where it stays."""

    num_views = 1
    """V, views of each image in an update."""
    num_choices: int
    """Number of classes or candidates among which the loss has the right one chosen: by chance it is log of this."""

    def __init__(self, model: PICModel) -> None:
        super().__init__()
        self.model = model

    def finish_update(self) -> None:
        """Changes what is not learnt by gradients, after the optimizer's step."""


class SimCLR(Method):
    """Chen et al., 2002.05709. BatchNorm sees both views of the batch together. Default τ: theirs for CIFAR-10."""

    num_views = 2

    def __init__(self, model: PICModel, task: Task, *, temperature: float = 0.5) -> None:
        super().__init__(model)
        self.num_choices = 2 * task.batch_size - 1
        self._loss = _lightly("lightly.loss").NTXentLoss(temperature=temperature)

    def forward(self, views: Sequence[Tensor], images: Tensor) -> Tensor:
        loss: Tensor = self._loss(*self.model(torch.cat(tuple(views))).chunk(2))
        return loss


class MoCoV2(Method):
    """Chen et al., 2003.04297: a queue of keys, by an encoder that follows the trained one.

    Shuffled BatchNorm on one device (He et al., 1911.05722, section 3.3): queries and keys are computed in parts of
    `batch_norm_size`, by default the 32 images of one of their GPUs or half of a smaller batch, and keys are shuffled
    before, so that BatchNorm does not give away which key belongs to a query. The queue holds at most half of the
    images: in epoch order a query meets an older key of its own image in (q/N)²/2 of the cases, one in eight. Default
    queue and momentum: those of the authors' demo on CIFAR-10, whose runs are short, too; default τ: MoCo v2's for
    ImageNet, where the demo has 0.1.
    """

    num_views = 2

    def __init__(
        self,
        model: PICModel,
        task: Task,
        *,
        temperature: float = 0.2,
        queue_size: int = 4_096,
        momentum: float = 0.99,
        batch_norm_size: int | None = None,
    ) -> None:
        super().__init__(model)
        self._momentum = momentum
        self._batch_norm_size = batch_norm_size or min(32, max(2, task.batch_size // 2))
        self._utils = _lightly("lightly.models.utils")
        self.key_model = copy.deepcopy(model)
        self._utils.deactivate_requires_grad(self.key_model)
        size = max(1, min(queue_size, task.num_images // 2))
        self.num_choices = 1 + size
        loss = _lightly("lightly.loss").NTXentLoss(temperature=temperature, memory_bank_size=(size, task.dim))
        self._loss = loss.to(next(model.parameters()).device)
        self.register_buffer("queue", self._loss.memory_bank.bank)  # lightly leaves its buffers out of state_dict
        self.register_buffer("queue_position", self._loss.memory_bank.bank_ptr)

    def forward(self, views: Sequence[Tensor], images: Tensor) -> Tensor:
        queries = torch.cat([self.model(part) for part in _parts(views[0], self._batch_norm_size)])  # (b, D)
        with torch.no_grad():
            self._utils.update_momentum(self.model, self.key_model, self._momentum)
            shuffled, order = self._utils.batch_shuffle(views[1])
            keys = torch.cat([self.key_model(part) for part in _parts(shuffled, self._batch_norm_size)])
            keys = self._utils.batch_unshuffle(keys, order)  # (b, D)
        loss: Tensor = self._loss(queries, keys)
        return loss


class MemoryBank(Method):
    """Non-parametric instance discrimination (Wu et al., 1805.01978): a softmax over the embeddings of all N images.

    The bank holds each image's embedding, a moving average. As in the authors' code for CIFAR-10, which the defaults
    are from, the softmax is exact, without noise-contrastive estimation.
    """

    bank: Tensor

    def __init__(self, model: PICModel, task: Task, *, temperature: float = 0.1, momentum: float = 0.5) -> None:
        super().__init__(model)
        self.num_choices = task.num_images
        self._temperature, self._momentum = temperature, momentum
        bank = F.normalize(torch.randn(task.num_images, task.dim))
        self.register_buffer("bank", bank.to(next(model.parameters()).device))
        self._seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, views: Sequence[Tensor], images: Tensor) -> Tensor:
        embeddings = F.normalize(self.model(views[0]))  # (b, D)
        self._seen.append((images, embeddings.detach()))
        return F.cross_entropy(embeddings @ self.bank.T / self._temperature, images)

    @torch.no_grad()
    def finish_update(self) -> None:
        for images, embeddings in self._seen:
            self.bank[images] = F.normalize(torch.lerp(embeddings, self.bank[images], self._momentum))
        self._seen.clear()


class Classifier(Method):
    """A linear classifier on the encoder's features, without a projection head, and its softmax."""

    def __init__(self, model: PICModel, num_classes: int, *, bias: bool, label_smoothing: float) -> None:
        super().__init__(model)
        model.head = nn.Sequential()  # so that the model returns its features
        self.num_choices = num_classes
        self._label_smoothing = label_smoothing
        device = next(model.parameters()).device
        self.classifier = nn.Linear(model.feature_dim, num_classes, bias=bias).to(device)

    def classes_of(self, images: Tensor) -> Tensor:
        """The images' classes, int64 (b,)."""
        return images

    def forward(self, views: Sequence[Tensor], images: Tensor) -> Tensor:
        logits = self.classifier(self.model(views[0]))  # (b, number of classes)
        return F.cross_entropy(logits, self.classes_of(images), label_smoothing=self._label_smoothing)


class Diet(Classifier):
    """Balestriero, 2302.10260: every image is a class of a plain softmax over all N, with label smoothing.

    An update costs N · d for d features, and all N · d weights move in it.
    """

    def __init__(self, model: PICModel, task: Task, *, label_smoothing: float = DIET_LABEL_SMOOTHING) -> None:
        super().__init__(model, task.num_images, bias=False, label_smoothing=label_smoothing)


class Supervised(Classifier):
    """The labels' classes: what the same encoder and schedule reach with labels."""

    def __init__(self, model: PICModel, task: Task, *, label_smoothing: float = 0.0) -> None:
        task.dataset.check_labelled()
        labels = task.dataset.train_labels
        super().__init__(model, int(labels.max()) + 1, bias=True, label_smoothing=label_smoothing)
        self._labels = labels.to(next(model.parameters()).device)

    def classes_of(self, images: Tensor) -> Tensor:
        return self._labels[images]


METHODS: dict[str, Callable[..., Method]] = {
    "simclr": SimCLR,
    "mocov2": MoCoV2,
    "memory-bank": MemoryBank,
    "diet": Diet,
    "supervised": Supervised,
}


def _parts(batch: Tensor, size: int) -> Sequence[Tensor]:
    """Splits a batch into nearly equal parts of at most `size`; BatchNorm fails on a part of one image."""
    return batch.tensor_split(-(-len(batch) // size))


def _lightly(module: str) -> Any:
    """Imports a module of lightly; raises ValueError if it is not installed."""
    if find_spec("lightly") is None:
        raise ValueError("this method needs lightly: pip install -c constraints.txt '.[trainer,experiments]'")
    return import_module(module)  # lightly imports torchvision
