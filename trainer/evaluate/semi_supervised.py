"""Semi-supervised classification: fine-tuning on a few labels (paper, appendix, Experimental Settings)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from trainer.data import Dataset
from trainer.data.decoded_images import DecodedImages
from trainer.evaluate.classifiers import ClassifierConfig, Classifiers, check_learning_rates
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.settings import Settings, check_at_least, check_not_negative

_HELD_OUT_SHARE = 0.2
_EPOCHS_OF_ONE_PERCENT, _EPOCHS = 10, 20


@dataclass(frozen=True, kw_only=True)
class SemiSupervisedConfig(Settings):
    """Settings of semi-supervised classification; the defaults are the paper's."""

    labels: float = 0.01
    """Share of each class's training images whose labels are used: 0.01 and 0.1 in the paper. Chosen by --seed."""
    split_file: Path | None = None
    """A file with the names of the labelled images, one a line, as the public 1percent.txt and 10percent.txt; instead
    of --labels. Needs --dataset folder."""
    epochs: int | None = None
    """Passes over the labelled images. Default: 10 for about 1 % of the training images (at most 1.5), 20 for more."""
    batch_size: int = 256
    """Images in a step, of all ranks together."""
    learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    """Initial learning rates, which the paper does not give. Of several, a fifth of the labelled images chooses; then
    all of them are used for training."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 3e-5
    """Weight decay of SGD."""
    seed: int = 0
    """Seed of the labelled images, the crops, the order of images and the classifier's initial weights."""

    def check(self) -> None:
        if not 0 < self.labels <= 1:
            raise ValueError(f"--labels is {self.labels}: give a share above 0, at most 1")
        check_learning_rates(self.learning_rates)
        check_at_least(self, 1, "epochs", "batch_size")
        check_not_negative(self, "momentum", "weight_decay")


def default_epochs(num_labelled: int, num_images: int) -> int:
    """The paper's 10 passes for 1 % of the images and 20 for 10 %; splits of classes are not exactly 1 %."""
    return _EPOCHS_OF_ONE_PERCENT if num_labelled <= 0.015 * num_images else _EPOCHS


def semi_supervised(evaluation: Evaluation, config: SemiSupervisedConfig) -> Outcome:
    """Fine-tunes the encoder and a linear classifier on the labelled images, and tests them on centre crops.

    Raises:
        ValueError: images without labels, fewer of them than a batch, no encoder, or a split that does not fit.
    """
    evaluation.subject.require_encoder("semi-supervised")
    dataset = evaluation.load()
    dataset.check_labelled(tested=True)
    labelled = labelled_images(dataset, config)
    epochs = config.epochs or default_epochs(len(labelled), len(dataset.train_images))

    settings = ClassifierConfig(
        epochs=epochs,
        batch_size=config.batch_size,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        seed=config.seed,
    )

    def trained(ids: Tensor, rate: float, name: str) -> Classifiers:
        classifier = Classifiers(evaluation, ids, settings, (rate,))
        classifier.train(f"{name}, learning rate {rate!r}")
        return classifier

    rate, chosen = config.learning_rates[0], dict[str, Any]()
    if len(config.learning_rates) > 1:
        held_out = balanced_share(dataset.train_labels, labelled, _HELD_OUT_SHARE, config.seed + 1, leave=1)
        fitted = labelled[~torch.isin(labelled, held_out)]
        of_rates = {rate: trained(fitted, rate, "choice").held_out(held_out)[0][0] for rate in config.learning_rates}
        rate = max(of_rates, key=lambda each: of_rates[each])  # the first of equals
        chosen = {
            "learning_rate": rate,
            "held_out_top1": of_rates[rate],
            "on": f"{len(held_out)} of the {len(labelled)} labelled images, of which the others were trained on",
        }
    ((top1, top5),) = trained(labelled, rate, "all").tested()
    details = {"labelled_images": len(labelled), "epochs": epochs}
    return Outcome(results={"top1": top1, "top5": top5}, chosen=chosen, details=details)


def labelled_images(dataset: Dataset, config: SemiSupervisedConfig) -> Tensor:
    """The ids, int64 [n] in rising order, of the training images whose labels may be used."""
    if config.split_file is None:
        every = torch.arange(len(dataset.train_images))
        return balanced_share(dataset.train_labels, every, config.labels, config.seed)
    return _in_split_file(dataset, config.split_file)


def balanced_share(labels: Tensor, ids: Tensor, share: float, seed: int, *, leave: int = 0) -> Tensor:
    """Of each class a `share` of the images `ids` (int64 [n]), rounded, at least one; ids int64 in rising order.

    At least `leave` images of each class are left.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = ids[torch.randperm(len(ids), generator=generator)]
    taken = []
    for label in torch.unique(labels[ids]).tolist():
        of_class = shuffled[labels[shuffled] == label]
        taken.append(of_class[: min(len(of_class) - leave, max(1, round(share * len(of_class))))])
    return torch.cat(taken).sort().values


def _in_split_file(dataset: Dataset, file: Path) -> Tensor:
    """The training images named in a split file. Raises ValueError if one is not among them, or there is none."""
    images = dataset.train_images
    if not isinstance(images, DecodedImages):
        raise ValueError("--split-file names files, but these images have no names: give --labels instead")
    try:
        wanted = {PurePosixPath(line).name for line in file.read_text().split()}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the split file {file} ({error}): give a list of image names") from None
    found = {PurePosixPath(name).name: number for number, name in enumerate(images.names())}
    if missing := wanted - found.keys():
        raise ValueError(
            f"{len(missing)} of the {len(wanted)} images of {file} are not among the training images, such as "
            f"{min(missing)}: give the split of this data set, as --dataset folder"
        )
    if not wanted:
        raise ValueError(f"the split file {file} is empty: give a list of image names")
    return torch.tensor(sorted(found[name] for name in wanted))
