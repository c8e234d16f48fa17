"""Classification by training: linear on a frozen encoder, and fine-tuned with all labels or a few of them.

Of the paper: section 4 for the linear protocol (He et al., 1911.05722), whose encoder stays in eval mode, and the
appendix, Experimental Settings, for semi-supervised classification on ImageNet and for iNaturalist 2018.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from trainer.evaluate.classifiers import Classifiers
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.protocol import split_held_out
from trainer.evaluate.settings import FineTuneConfig, LinearConfig
from trainer.evaluate.training import DivergedError
from weightserver.common.logs import Remark, say

_HELD_OUT_SHARE = 0.2
_EPOCHS_OF_ONE_PERCENT, _EPOCHS = 10, 20


def linear(evaluation: Evaluation, config: LinearConfig) -> Outcome:
    """Trains linear heads on the encoder's features of the training images and tests the best on centre crops.

    Every learning rate trains a head of its own on the same features, so that several cost little more than one.

    Raises:
        ValueError: images without labels, or fewer of them than a batch.
    """
    dataset, rates = evaluation.labelled(), config.learning_rates
    fitted, held_out = torch.arange(len(dataset.train_images)), None
    if len(rates) > 1:
        fitted, held_out = split_held_out(len(dataset.train_images))
    frozen = evaluation.frozen()
    heads = Classifiers(evaluation, fitted, config, rates, epochs=config.epochs, frozen=frozen)
    heads.train("linear")
    best, chosen = 0, {}
    if held_out is not None:
        finite = heads.finite
        for rate in (rate for rate, one in zip(rates, finite, strict=True) if not one):
            say(Remark(f"learning rate {rate!r} is not chosen: its loss diverges", learning_rate=rate), logging.WARNING)
        shares = [top1 if one else -1.0 for (top1, _), one in zip(heads.held_out(held_out), finite, strict=True)]
        best = max(range(len(shares)), key=lambda head: shares[head])  # the first of equals
        chosen = {
            "learning_rate": rates[best],
            "held_out_top1": shares[best],
            "on": f"{len(held_out)} training images that no head was trained on",
        }
    top1, top5 = heads.tested()[best]
    frozen.check()
    return Outcome(results={"top1": top1, "top5": top5}, chosen=chosen)


def fine_tune(evaluation: Evaluation, config: FineTuneConfig) -> Outcome:
    """Trains encoder and classifier on the labelled images, and tests them on centre crops.

    Raises:
        ValueError: images without labels, fewer of them than a batch, or no encoder.
    """
    evaluation.encoder.require_encoder("fine-tuning")
    dataset = evaluation.labelled()
    labelled = torch.arange(len(dataset.train_images))
    if config.labels < 1:
        labelled = balanced_share(dataset.train_labels, labelled, config.labels, config.seed)
    epochs = config.epochs or default_epochs(len(labelled), len(dataset.train_images))

    def trained(ids: Tensor, rate: float, name: str) -> Classifiers:
        classifier = Classifiers(evaluation, ids, config, (rate,), epochs=epochs, temperature=config.temperature)
        classifier.train(f"{name}, learning rate {rate!r}")
        return classifier

    rate, chosen = config.learning_rates[0], dict[str, Any]()
    if len(config.learning_rates) > 1:
        held_out = balanced_share(dataset.train_labels, labelled, _HELD_OUT_SHARE, config.seed + 1, leave=1)
        if not len(held_out):
            raise ValueError(
                "each class has one labelled image, so none is left to choose among --learning-rates: give one, or "
                "more --labels"
            )
        fitted = labelled[~torch.isin(labelled, held_out)]
        of_rates = dict[float, float]()
        for each in config.learning_rates:
            try:
                of_rates[each] = trained(fitted, each, "choice").held_out(held_out)[0][0]
            except DivergedError as error:
                say(Remark(f"learning rate {each!r} is not chosen: {error}", learning_rate=each), logging.WARNING)
        if not of_rates:
            raise ValueError("the loss diverges at each of --learning-rates: give lower ones")
        rate = max(of_rates, key=lambda each: of_rates[each])  # the first of equals
        chosen = {
            "learning_rate": rate,
            "held_out_top1": of_rates[rate],
            "on": f"{len(held_out)} of the {len(labelled)} labelled images, of which the others were trained on",
        }
    ((top1, top5),) = trained(labelled, rate, "all").tested()
    details = {"labelled_images": len(labelled), "epochs": epochs}
    return Outcome(results={"top1": top1, "top5": top5}, chosen=chosen, details=details)


def default_epochs(num_labelled: int, num_images: int) -> int:
    """The paper's 10 passes for 1 % of the images and 20 for 10 %; splits of classes are not exactly 1 %."""
    return _EPOCHS_OF_ONE_PERCENT if num_labelled <= 0.015 * num_images else _EPOCHS


def balanced_share(labels: Tensor, ids: Tensor, share: float, seed: int, *, leave: int = 0) -> Tensor:
    """Draws a rounded `share` of each class's images among `ids` (int64 [n]), at least one; returns rising ids.

    At least `leave` images of each class are left.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = ids[torch.randperm(len(ids), generator=generator)]
    taken = []
    for label in torch.unique(labels[ids]).tolist():
        of_class = shuffled[labels[shuffled] == label]
        taken.append(of_class[: min(len(of_class) - leave, max(1, round(share * len(of_class))))])
    return torch.cat(taken).sort().values
