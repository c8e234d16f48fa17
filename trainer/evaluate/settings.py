"""Settings of the protocols that every user runs; importing them loads no library, so that --help is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.settings import SettingError, Settings, check_at_least, check_not_negative, check_positive

K_CHOICES = (1, 5, 10, 20, 50, 100, 200)
"""Candidates for the number of neighbours."""
_MOST_SEEDS = 2**44
"""A seed times 1,000,003, of which that of an epoch is made, has less than 64 bits."""
VOTE_TEMPERATURE = 0.07
"""A neighbour with cosine similarity s has exp(s / 0.07) votes."""


def check_positive_numbers(name: str, numbers: tuple[float, ...]) -> None:
    """Raises ValueError for no numbers, or one that is not positive and finite."""
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{name} is {numbers}: give one or more numbers, positive and finite")


@dataclass(frozen=True, kw_only=True)
class KnnConfig(Settings):
    """Settings of the kNN protocol."""

    k: tuple[int, ...] | None = None
    """Numbers of neighbours; each gives a result, as --k 10 20 100 200 for DINO's table. Default: one of 1, 5, 10, 20,
    50, 100 and 200 is chosen on held-out training images."""

    def check(self) -> None:
        if self.k is not None and (not self.k or min(self.k) < 1):
            raise ValueError(f"--k is {self.k}: give one or more numbers, at least 1")


@dataclass(frozen=True, kw_only=True)
class LinearCachedConfig(Settings):
    """Settings of the protocol on features computed once: how λ is chosen."""

    folds: int | None = None
    """Choose λ by cross-validation in this many parts of the training images, each held out in turn. Default: 5,000
    images are held out, a tenth if that is fewer. With less than 50,000, five folds choose better, and take up to
    five times as long."""

    def check(self) -> None:
        check_at_least(self, 2, "folds")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings):
    """How a network, classifiers or a whole encoder, is trained by SGD."""

    batch_size: int = 256
    """Images in a step, of all ranks together."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay of SGD."""
    seed: int = 0
    """Seed of the new layers' initial weights, of the order of images, their crops, and all else that is drawn."""

    def check(self) -> None:
        check_at_least(self, 1, "batch_size")
        if not 0 <= self.seed < _MOST_SEEDS:
            raise SettingError(f"--seed must lie in 0..2^44-1, got {self.seed}", "seed")
        check_not_negative(self, "momentum", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class LinearConfig(TrainingConfig):
    """Settings of the linear protocol; the defaults are the paper's."""

    epochs: int = 100
    """Passes over the training images."""
    learning_rates: tuple[float, ...] = (30.0,)
    """One head is trained for each. Of several, held-out training images choose."""

    def check(self) -> None:
        check_at_least(self, 1, "epochs")
        check_positive_numbers("--learning-rates", self.learning_rates)
        super().check()


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig(TrainingConfig):
    """Settings of fine-tuning; the defaults are the paper's for iNaturalist 2018."""

    labels: float = 1.0
    """Share of each class's training images whose labels are used, chosen by --seed."""
    epochs: int | None = 100
    """Passes over the labelled images. None: 10 if these are about 1 % of the training images (at most 1.5), otherwise
    20."""
    learning_rates: tuple[float, ...] = (0.2,)
    """Initial learning rate of encoder and classifier; a cosine takes it to 0, without a warm-up. Of several, a fifth
    of the labelled images chooses; then all of them are used for training."""
    weight_decay: float = 1e-4
    """Weight decay of SGD."""
    temperature: float | None = 0.03
    """τ of a cosine classifier. None: the classifier is linear."""

    def check(self) -> None:
        if not 0 < self.labels <= 1:
            raise ValueError(f"--labels is {self.labels}: give a share above 0, at most 1")
        check_at_least(self, 1, "epochs")
        check_positive_numbers("--learning-rates", self.learning_rates)
        if self.temperature is not None:
            check_positive(self, "temperature")
        super().check()


SEMI_SUPERVISED = FineTuneConfig(
    labels=0.01, epochs=None, learning_rates=(0.003, 0.01, 0.03, 0.1), weight_decay=3e-5, temperature=None
)
"""The paper's settings of semi-supervised classification, with learning rates, which it does not give."""
