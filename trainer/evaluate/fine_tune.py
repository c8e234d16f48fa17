"""Fine-tuning with a cosine classifier, as on iNaturalist 2018 (paper, appendix, Experimental Settings)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.evaluate.classifiers import ClassifierConfig, Classifiers
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.settings import check_positive


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig(ClassifierConfig):
    """Settings of fine-tuning; the defaults are the paper's for iNaturalist 2018."""

    learning_rate: float = 0.2
    """Initial learning rate of encoder and classifier; a cosine takes it to 0, without a warm-up."""
    weight_decay: float = 1e-4
    """Weight decay of SGD."""
    temperature: float = 0.03
    """τ of the cosine classifier."""

    def check(self) -> None:
        check_positive(self, "learning_rate", "temperature")
        super().check()


def fine_tune(evaluation: Evaluation, config: FineTuneConfig) -> Outcome:
    """Trains encoder and classifier on all training images, and tests them on centre crops.

    Raises:
        ValueError: images without labels, fewer of them than a batch, or no encoder.
    """
    evaluation.subject.require_encoder("fine-tune")
    dataset = evaluation.load()
    dataset.check_labelled(tested=True)
    every, rates = torch.arange(len(dataset.train_images)), (config.learning_rate,)
    classifier = Classifiers(evaluation, every, config, rates, temperature=config.temperature)
    classifier.train("fine-tune")
    ((top1, top5),) = classifier.tested()
    return Outcome(results={"top1": top1, "top5": top5})
