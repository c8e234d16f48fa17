"""Classification by training: learning, frozen encoders, choices on held-out images, labelled images, splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.evaluations import Convolution, SeesNothing, SeesRows, made_dataset, made_evaluation
from trainer.evaluate.classification import balanced_share, default_epochs, fine_tune, linear
from trainer.evaluate.classifiers import CosineClassifier
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.settings import SEMI_SUPERVISED, FineTuneConfig, LinearConfig
from trainer.settings import Settings

FINE_TUNE = FineTuneConfig(epochs=2, batch_size=32, learning_rates=(0.05,), temperature=0.1)
LINEAR = LinearConfig(epochs=3, batch_size=32, learning_rates=(1.0,))
SEMI = replace(SEMI_SUPERVISED, labels=0.5, epochs=4, batch_size=30, learning_rates=(0.3,))


def test_cosine_classifier_is_scaled_cosine() -> None:
    classifier = CosineClassifier(2, 2, 0.03)
    classifier.weight.data = torch.tensor([[2.0, 0.0], [0.0, -5.0]])
    found = classifier(torch.tensor([[3.0, 0.0], [1.0, 1.0]]))
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0], [2**-0.5, -(2**-0.5)]]) / 0.03)


@pytest.mark.parametrize(
    ("protocol", "config", "encoder"),
    [(linear, replace(LINEAR, epochs=10), SeesRows), (fine_tune, FINE_TUNE, Convolution)],
)
def test_tells_a_good_encoder_from_a_bad_one_and_leaves_it_as_it_was(
    tmp_path: Path, protocol: Callable[[Evaluation, Any], Outcome], config: Settings, encoder: type[nn.Module]
) -> None:
    given = encoder().eval()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    good = protocol(made_evaluation(given, tmp_path / "good"), config).results
    assert good["top1"] > 90
    assert good["top5"] == 100, "there are four classes"
    assert protocol(made_evaluation(SeesNothing(), tmp_path / "bad"), config).results["top1"] < 45
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())


def test_refuses_the_result_of_an_encoder_that_changed(tmp_path: Path) -> None:
    class Counting(SeesRows):
        def forward(self, images: Tensor) -> Tensor:
            assert self.norm.running_mean is not None
            self.norm.running_mean += 1e-3
            return super().forward(images)

    with pytest.raises(RuntimeError, match="running_mean of the frozen encoder has changed"):
        linear(made_evaluation(Counting(), tmp_path), LINEAR)


def test_held_out_images_choose_among_learning_rates(tmp_path: Path) -> None:
    dataset, config = made_dataset(), replace(LINEAR, learning_rates=(1e-6, 1.0), epochs=8)
    assert linear(made_evaluation(SeesRows(), tmp_path / "one"), LINEAR).chosen == {}
    chosen = linear(made_evaluation(SeesRows(), tmp_path / "two"), config).chosen
    assert chosen["learning_rate"] == 1.0
    assert chosen["held_out_top1"] > 90
    without_labels = replace(dataset, test_labels=dataset.test_labels * 0)
    other = linear(made_evaluation(SeesRows(), tmp_path / "three", without_labels), config)
    assert other.chosen == chosen, "no test label chooses"


def test_infinite_numbers_are_no_result(tmp_path: Path) -> None:
    encoder = SeesRows()
    encoder.norm.weight.data *= 1e38
    with pytest.raises(ValueError, match=r"not all finite|the loss is"):
        linear(made_evaluation(encoder, tmp_path / "one"), LINEAR)
    with pytest.raises(ValueError, match="the loss is nan after 10 steps: give a lower learning rate"):
        linear(made_evaluation(SeesRows(), tmp_path / "two"), replace(LINEAR, learning_rates=(1e38,)))


def test_semi_supervised_chooses_a_learning_rate_on_labelled_images(tmp_path: Path) -> None:
    dataset = made_dataset()
    config = replace(SEMI, learning_rates=(1e-7, 0.3))
    found = fine_tune(made_evaluation(SeesRows(), tmp_path / "one", dataset), config)
    assert found.results["top1"] > 60
    assert found.chosen["learning_rate"] == 0.3
    labelled = balanced_share(dataset.train_labels, torch.arange(320), config.labels, config.seed)
    assert found.details["labelled_images"] == len(labelled)
    hidden = torch.full_like(dataset.train_labels, 3)
    hidden[labelled] = dataset.train_labels[labelled]
    relabelled = replace(dataset, train_labels=hidden, test_labels=dataset.test_labels)

    def as_labelled(_: object, ids: Tensor, share: float, seed: int, *, leave: int = 0) -> Tensor:
        return balanced_share(dataset.train_labels, ids, share, seed, leave=leave)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.evaluate.classification.balanced_share", as_labelled)
        again = fine_tune(made_evaluation(SeesRows(), tmp_path / "two", relabelled), config)
    assert again == found, "no other label is used"


def test_a_learning_rate_that_diverges_is_not_chosen(tmp_path: Path) -> None:
    found = fine_tune(made_evaluation(SeesRows(), tmp_path / "one"), replace(SEMI, learning_rates=(1e38, 0.3)))
    assert found.chosen["learning_rate"] == 0.3
    several = [replace(LINEAR, learning_rates=(other, 1.0), epochs=8) for other in (1e38, 1e-6)]
    heads = [linear(made_evaluation(SeesRows(), tmp_path / f"{one.learning_rates[0]}"), one) for one in several]
    assert heads[0] == heads[1], "the other head goes on"
    with pytest.raises(ValueError, match="the loss diverges at each of --learning-rates: give lower ones"):
        fine_tune(made_evaluation(SeesRows(), tmp_path / "two"), replace(SEMI, learning_rates=(1e38, 1e37)))
    few = replace(SEMI, labels=0.001, batch_size=4, learning_rates=(0.1, 0.3))
    with pytest.raises(ValueError, match="each class has one labelled image, so none is left to choose"):
        fine_tune(made_evaluation(SeesRows(), tmp_path / "three"), few)


def test_labelled_images_are_balanced_and_chosen_by_seed() -> None:
    labels = torch.tensor([0] * 1300 + [1] * 732 + [2] * 20)
    found = balanced_share(labels, torch.arange(len(labels)), 0.01, seed=0)
    assert torch.bincount(labels[found]).tolist() == [13, 7, 1], "at least one"
    assert torch.equal(found, balanced_share(labels, torch.arange(len(labels)), 0.01, seed=0))
    assert not torch.equal(found, balanced_share(labels, torch.arange(len(labels)), 0.01, seed=1))
    left = balanced_share(labels, torch.tensor([5, 2040, 2041]), 0.2, seed=0, leave=1)
    assert left.tolist() in ([2040], [2041]), "a class keeps its only image"
    some = torch.arange(1290, 1340)
    assert set(balanced_share(labels, some, 0.5, seed=0).tolist()) <= set(some.tolist())


def test_rejects_what_cannot_be_trained(tmp_path: Path) -> None:
    evaluation = made_evaluation(SeesRows(), tmp_path)
    with pytest.raises(ValueError, match="320 training images make no batch of 400: give a smaller --batch-size"):
        fine_tune(evaluation, replace(FINE_TUNE, batch_size=400))
    without = replace(made_dataset(), train_labels=torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="have no labels"):
        linear(made_evaluation(SeesRows(), tmp_path, without), LINEAR)
    for config, message in (
        (FineTuneConfig(labels=0.0), "--labels is 0.0: give a share"),
        (FineTuneConfig(labels=1.5), "--labels is 1.5: give a share"),
        (FineTuneConfig(learning_rates=()), "--learning-rates is .* positive and finite"),
        (LinearConfig(learning_rates=(1.0, float("nan"))), "--learning-rates is .* positive and finite"),
        (FineTuneConfig(temperature=0.0), "--temperature must be positive"),
        (LinearConfig(epochs=0), "--epochs must be at least 1, got 0"),
        (LinearConfig(seed=2**44), r"--seed must lie in 0\.\.2\^44-1, got"),
        (LinearConfig(seed=-1), r"--seed must lie in 0\.\.2\^44-1, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            config.check()


def test_epochs_follow_the_share_of_labels() -> None:
    assert default_epochs(12_811, 1_281_167) == 10
    assert default_epochs(128_116, 1_281_167) == 20
