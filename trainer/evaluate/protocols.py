"""The protocols by name: their settings, and how each runs in an `Evaluation`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from trainer.evaluate.detect import DetectConfig, detect, write_detectron2
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.fine_tune import FineTuneConfig, fine_tune
from trainer.evaluate.knn import KnnConfig, knn
from trainer.evaluate.linear import LinearConfig, linear
from trainer.evaluate.linear_cached import LinearCachedConfig, linear_cached
from trainer.evaluate.partition import PartitionConfig, partition
from trainer.evaluate.saliency import MappedEncoder, SaliencyConfig, saliency
from trainer.evaluate.segment import SegmentConfig, segment
from trainer.evaluate.semi_supervised import SemiSupervisedConfig, semi_supervised
from trainer.settings import Settings


class Protocol(NamedTuple):
    """A way to evaluate."""

    settings: type[Settings]
    run: Callable[[Evaluation, Any], Outcome]
    summary: str
    pixels: bool = False
    """Whether it can evaluate raw pixels."""
    labelled: bool = True
    """Whether it needs labels, and test images of the training images' classes."""
    images: str = ""
    """Name of the images if they have a format of their own, in --data-dir."""


def _detect(evaluation: Evaluation, config: DetectConfig) -> Outcome:
    encoder, encoder_config = evaluation.subject.require_encoder("detect")
    if config.detectron2 is not None:
        files = []
        if evaluation.ranks.is_first:
            files = write_detectron2(encoder, encoder_config, config, config.detectron2)
        return Outcome(results={}, details={"files": [str(file) for file in files]})
    result = detect(
        encoder,
        encoder_config,
        _folder(evaluation, "the folder of Pascal VOC, VOCdevkit"),
        config,
        evaluation.ranks,
        bfloat16=evaluation.bfloat16,
        state_file=evaluation.state / "network.safetensors",
        progress=evaluation.progress,
    )
    details = asdict(result)
    return Outcome(results={name: details.pop(name) for name in ("ap", "ap50", "ap75")}, details=details)


def _segment(evaluation: Evaluation, config: SegmentConfig) -> Outcome:
    encoder, encoder_config = evaluation.subject.require_encoder("segment")
    result = segment(
        encoder,
        encoder_config,
        _folder(evaluation, "the folder of Cityscapes, with leftImg8bit and gtFine"),
        config,
        evaluation.ranks,
        bfloat16=evaluation.bfloat16,
        state_file=evaluation.state / "network.safetensors",
        progress=evaluation.progress,
    )
    details = asdict(result)
    return Outcome(results={"miou": details.pop("miou")}, details=details)


def _saliency(evaluation: Evaluation, config: SaliencyConfig) -> Outcome:
    encoder, encoder_config = evaluation.subject.require_encoder("saliency")
    result = saliency(
        MappedEncoder(name=evaluation.subject.name, encoder=encoder, config=encoder_config),
        evaluation.load(),
        config,
        evaluation.state.parent,
        evaluation.ranks,
        bfloat16=evaluation.bfloat16,
        progress=evaluation.progress,
    )
    details = asdict(result)
    top1 = details.pop("knn_top1")
    similarities = details["similarities"]
    results = {"similarity": similarities["mean"]} if similarities else {}
    return Outcome(results=results | ({} if top1 is None else {"knn_top1": top1}), details=details)


def _folder(evaluation: Evaluation, what: str) -> Path:
    if evaluation.data_dir is None:
        raise ValueError(f"--data-dir is missing: give {what}")
    return evaluation.data_dir


PROTOCOLS = {
    "knn": Protocol(KnnConfig, knn, "Classify by nearest neighbours among the training images' features.", pixels=True),
    "linear": Protocol(LinearConfig, linear, "Train a linear classifier on frozen features of crops.", pixels=True),
    "linear-cached": Protocol(
        LinearCachedConfig,
        linear_cached,
        "Fit a regularised linear classifier to features of whole images, for small sets.",
        pixels=True,
    ),
    "semi-supervised": Protocol(
        SemiSupervisedConfig, semi_supervised, "Fine-tune encoder and classifier on a few labelled images."
    ),
    "fine-tune": Protocol(FineTuneConfig, fine_tune, "Fine-tune encoder and cosine classifier on all labelled images."),
    "detect": Protocol(DetectConfig, _detect, "Train an object detector on Pascal VOC.", images="pascal-voc"),
    "segment": Protocol(
        SegmentConfig, _segment, "Train a semantic segmentation network on Cityscapes.", images="cityscapes"
    ),
    "saliency": Protocol(
        SaliencyConfig, _saliency, "Draw saliency maps and compare them with another encoder's.", labelled=False
    ),
    "partition": Protocol(
        PartitionConfig,
        partition,
        "Divide labelled classes by clustering features, for the trainer's --labels.",
        pixels=True,
        labelled=False,
    ),
}
"""Every protocol by its name on the command line."""
