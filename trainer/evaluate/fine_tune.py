"""Fine-tuning with a cosine classifier, as on iNaturalist 2018 (paper, appendix, Experimental Settings)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.evaluate.classifiers import Classifiers, Recipe
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.settings import Settings, check_at_least, check_not_negative, check_positive


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig(Settings):
    """Settings of fine-tuning; the defaults are the paper's for iNaturalist 2018."""

    epochs: int = 100
    """Passes over the training images."""
    batch_size: int = 256
    """Images in a step, of all ranks together."""
    learning_rate: float = 0.2
    """Initial learning rate of encoder and classifier; a cosine takes it to 0, without a warm-up."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay of SGD."""
    temperature: float = 0.03
    """τ of the cosine classifier."""
    seed: int = 0
    """Seed of the crops, the order of images and the classifier's initial weights."""

    def check(self) -> None:
        check_at_least(self, 1, "epochs", "batch_size")
        check_positive(self, "learning_rate", "temperature")
        check_not_negative(self, "momentum", "weight_decay")


def fine_tune(evaluation: Evaluation, config: FineTuneConfig) -> Outcome:
    """Trains encoder and classifier on all training images, and tests them on centre crops.

    Raises:
        ValueError: images without labels, fewer of them than a batch, or no encoder.
    """
    evaluation.subject.require_encoder("fine-tune")
    dataset = evaluation.load()
    dataset.check_labelled(tested=True)
    settings = {name: value for name, value in vars(config).items() if name != "learning_rate"}
    recipe = Recipe(**settings, learning_rates=(config.learning_rate,))
    classifier = Classifiers(evaluation, torch.arange(len(dataset.train_images)), recipe)
    classifier.train("fine-tune")
    ((top1, top5),) = classifier.tested()
    return Outcome(results={"top1": top1, "top5": top5})
