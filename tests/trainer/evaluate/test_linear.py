"""The linear protocol: frozen features, and a good encoder told from a bad one."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.evaluations import (
    SeesNothing,
    SeesRows,
    made_dataset,
    made_evaluation,
)
from trainer.data import Dataset
from trainer.evaluate.classification import linear
from trainer.evaluate.evaluation import Outcome
from trainer.evaluate.settings import LinearConfig
from weightserver.torch import Ranks

CONFIG = LinearConfig(epochs=3, batch_size=32, learning_rates=(1.0,))


def probe(
    encoder: nn.Module, config: LinearConfig = CONFIG, dataset: Dataset | None = None, ranks: Ranks | None = None
) -> Outcome:
    with tempfile.TemporaryDirectory() as state:
        return linear(made_evaluation(encoder, Path(state), dataset, ranks), config)


def test_tells_a_good_encoder_from_a_bad_one() -> None:
    encoder = SeesRows()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    good = probe(encoder, replace(CONFIG, epochs=10))
    assert good.results["top1"] > 90
    assert good.results["top5"] == 100, "there are four classes"
    assert probe(SeesNothing()).results["top1"] < 45
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_refuses_the_result_of_an_encoder_that_changed() -> None:
    class Counting(SeesRows):
        def forward(self, images: Tensor) -> Tensor:
            assert self.norm.running_mean is not None
            self.norm.running_mean += 1e-3
            return super().forward(images)

    with pytest.raises(RuntimeError, match="running_mean of the frozen encoder has changed"):
        probe(Counting())


def test_held_out_images_choose_among_learning_rates() -> None:
    dataset = made_dataset()
    assert probe(SeesRows()).chosen == {}
    chosen = probe(SeesRows(), replace(CONFIG, learning_rates=(1e-6, 1.0), epochs=8)).chosen
    assert chosen["learning_rate"] == 1.0
    assert chosen["held_out_top1"] > 90
    without_labels = replace(dataset, test_labels=dataset.test_labels * 0)
    other = probe(SeesRows(), replace(CONFIG, learning_rates=(1e-6, 1.0)), without_labels)
    assert other.chosen["learning_rate"] == 1.0, "no test label chooses"


def test_infinite_numbers_are_no_result() -> None:
    encoder = SeesRows()
    encoder.norm.weight.data *= 1e38
    with pytest.raises(ValueError, match=r"not all finite|the loss is"):
        probe(encoder)
    with pytest.raises(ValueError, match="the loss is nan after 10 steps: give a lower learning rate"):
        probe(SeesRows(), replace(CONFIG, learning_rates=(1e38,)))


def test_rejects_what_makes_no_batch() -> None:
    with pytest.raises(ValueError, match=r"320 training images make no batch of 400: give a smaller --batch-size"):
        probe(SeesRows(), replace(CONFIG, batch_size=400))
    for rates in ((), (0.0,), (float("nan"),), (1.0, -1.0)):
        with pytest.raises(ValueError, match=r"--learning-rates is .* positive and finite"):
            LinearConfig(learning_rates=rates).check()
    with pytest.raises(ValueError, match="have no labels"):
        probe(SeesRows(), dataset=replace(made_dataset(), train_labels=torch.empty(0, dtype=torch.int64)))
