"""Linear classification on frozen features of random crops (paper, section 4; He et al., 1911.05722).

The encoder stays in eval mode and without gradients. Every learning rate trains a head of its own on the same features,
so that several cost little more than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.evaluate.classifiers import ClassifierConfig, Classifiers, check_learning_rates
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.frozen import Frozen
from trainer.evaluate.protocol import split_held_out


@dataclass(frozen=True, kw_only=True)
class LinearConfig(ClassifierConfig):
    """Settings of the linear protocol; the defaults are the paper's."""

    learning_rates: tuple[float, ...] = (30.0,)
    """One head is trained for each. Of several, held-out training images choose."""

    def check(self) -> None:
        check_learning_rates(self.learning_rates)
        super().check()


def linear(evaluation: Evaluation, config: LinearConfig) -> Outcome:
    """Trains linear heads on the encoder's features of the training images and tests the best on centre crops.

    Raises:
        ValueError: images without labels, or fewer of them than a batch.
    """
    dataset, subject = evaluation.load(), evaluation.subject
    dataset.check_labelled(tested=True)
    fitted, held_out = torch.arange(len(dataset.train_images)), None
    if len(config.learning_rates) > 1:
        fitted, held_out = split_held_out(len(dataset.train_images))
    frozen = Frozen(subject.network, subject.pixels, evaluation.ranks.device, bfloat16=evaluation.bfloat16)
    heads = Classifiers(evaluation, fitted, config, config.learning_rates, frozen=frozen)
    heads.train("linear")
    best, chosen = 0, {}
    if held_out is not None:
        shares = [top1 for top1, _ in heads.held_out(held_out)]
        best = max(range(len(shares)), key=lambda head: shares[head])  # the first of equals
        chosen = {
            "learning_rate": config.learning_rates[best],
            "held_out_top1": shares[best],
            "on": f"{len(held_out)} training images that no head was trained on",
        }
    top1, top5 = heads.tested()[best]
    frozen.check()
    return Outcome(results={"top1": top1, "top5": top5}, chosen=chosen)
