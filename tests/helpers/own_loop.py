"""A training loop of one's own with a head, and the same with dense torch.optim.SGD over the whole matrix."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from weightserver.core.initial import initial_rows
from weightserver.torch import ClassifierHead

NUM_CLASSES, DIM, NUM_NEGATIVES, BATCH_SIZE = 40, 6, 12, 4
TEMPERATURE = 0.2
STEPS = 14
SETTINGS: dict[str, Any] = {"num_negatives": NUM_NEGATIVES, "rows_per_block": 3, "init_std": 0.3, "weight_decay": 0.01}
INPUTS = torch.randn(NUM_CLASSES, 9, generator=torch.Generator().manual_seed(1))


class Images(Dataset[tuple[int, Tensor]]):
    """One image of each class, with its number."""

    def __len__(self) -> int:
        return NUM_CLASSES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, INPUTS[index]


def learning_rate(step: int) -> float:
    """Constant for some steps, then different in each."""
    return 0.4 if step < 5 else 0.3 / (1 + step)


class Encoder:
    """A linear encoder with its optimizer; the second view of an image is its negative."""

    def __init__(self) -> None:
        linear = nn.Linear(INPUTS.shape[1], DIM)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(2)
            linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) / 3)
            linear.bias.zero_()
        self.module: nn.Module = linear
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

    def weight(self) -> Tensor:
        """A copy, (D, inputs)."""
        return next(self.module.parameters()).detach().clone()

    def views(self, batch: Tensor, num_views: int) -> list[Tensor]:
        return [self.module(batch * sign) for sign in (1, -1)[:num_views]]

    def update(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Result:
    """What training leaves: each step's loss, all rows by class (N, D), and the encoder's weight."""

    losses: list[float] = field(default_factory=list)
    rows: Tensor = field(default_factory=lambda: torch.zeros(0))
    encoder: Tensor = field(default_factory=lambda: torch.zeros(0))

    def assert_close(self, other: Result) -> None:
        # a loss is a difference of logits of up to about ten, each with an error of some 6e-8 of itself
        np.testing.assert_allclose(self.losses, other.losses, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(self.rows, other.rows, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(self.encoder, other.encoder, rtol=2e-5, atol=2e-5)

    def assert_same(self, other: Result) -> None:
        """To the last bit."""
        assert self.losses == other.losses
        assert torch.equal(self.rows, other.rows)
        assert torch.equal(self.encoder, other.encoder)


def trained(
    head: ClassifierHead, epochs: Iterable[Iterable[Any]], *, steps: int = STEPS, encoder: Encoder | None = None
) -> Result:
    """Trains up to `steps` finished steps."""
    encoder, result = encoder or Encoder(), Result()
    for ids, batch in itertools.chain.from_iterable(epochs):
        loss = head(encoder.module(batch), ids)
        loss.backward()
        result.losses.append(loss.item())
        encoder.update(learning_rate(head.num_steps))
        head.step(learning_rate(head.num_steps))
        if head.num_steps == steps:
            break
    assert head.num_steps == steps
    result.rows, result.encoder = head.rows(range(NUM_CLASSES)), encoder.weight()
    return result


class Dense:
    """The oracle: every class in one matrix, of which a step's loss sees the K most recently visited rows."""

    def __init__(self, head: ClassifierHead) -> None:
        """For a head of the same settings."""
        self.head_loss = head._loss
        self.factor = head._table._rows.learning_rate_factor
        self.all_rows_move = bool(head.spec.correction)
        self.temperature = head._loss.divisor
        rows = head.order.rows(np.arange(NUM_CLASSES))
        self.weight = nn.Parameter(torch.from_numpy(initial_rows(head.spec, rows)))
        self.optimizer = torch.optim.SGD(
            [self.weight], lr=0.0, momentum=head.spec.momentum, weight_decay=head.spec.weight_decay
        )
        self.visits: list[int] = []

    def active(self) -> list[int]:
        """The K classes with the latest visits."""
        return list(dict.fromkeys(reversed(self.visits)))[:NUM_NEGATIVES]

    def loss(self, embeddings: Tensor, ids: Sequence[int]) -> Tensor:
        active = self.active()
        weight = self.weight[active]
        if self.head_loss.cosines:
            embeddings, weight = F.normalize(embeddings), F.normalize(weight)
        labels = torch.tensor([active.index(class_) for class_ in ids])
        logits = embeddings @ weight.T / self.temperature
        return F.cross_entropy(logits, labels)

    def update(self, rate: float) -> None:
        """Every row moves: a class without a gradient has one of zero. Without correction, inactive rows rest."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        resting = [] if self.all_rows_move else sorted(set(range(NUM_CLASSES)) - set(self.active()))
        held = [self.weight.data, self.optimizer.state[self.weight].get("momentum_buffer")]
        before = [torch.zeros_like(self.weight[resting]) if one is None else one[resting].clone() for one in held]
        self.optimizer.param_groups[0]["lr"] = self.factor * rate
        self.optimizer.step()
        held[1] = self.optimizer.state[self.weight].get("momentum_buffer")
        for values, kept in zip(held, before, strict=True):
            if values is not None:
                values[resting] = kept
        self.weight.grad = None

    def trained(self, batches: Iterable[list[int]]) -> Result:
        encoder, result = Encoder(), Result()
        for number, ids in enumerate(batches):
            self.visits += ids
            loss = self.loss(encoder.module(INPUTS[ids]), ids)
            loss.backward()
            result.losses.append(loss.item())
            encoder.update(learning_rate(number))
            self.update(learning_rate(number))
        result.rows, result.encoder = self.weight.detach().clone(), encoder.weight()
        return result


def shuffled(seed: int, num_batches: int) -> list[list[int]]:
    """Batches of classes in any order."""
    generator = np.random.default_rng(seed)
    return [generator.choice(NUM_CLASSES, BATCH_SIZE, replace=False).tolist() for _ in range(num_batches)]


def loaded(batches: Iterable[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """What a DataLoader would yield."""
    return [(torch.tensor(list(ids)), INPUTS[list(ids)]) for ids in batches]
