"""The command line of evaluations: options common to all protocols, and those of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from rich.console import Console

from trainer.compute import ComputeConfig
from trainer.data import DATASETS, DECODED, Dataset, load_dataset
from trainer.distributed import Ranks, process_group
from trainer.evaluate.evaluation import Evaluation, Outcome, Subject, evaluate
from trainer.evaluate.fine_tune import FineTuneConfig, fine_tune
from trainer.evaluate.knn import KnnConfig, knn
from trainer.evaluate.linear import LinearConfig, linear
from trainer.evaluate.linear_cached import LinearCachedConfig, linear_cached
from trainer.evaluate.semi_supervised import SemiSupervisedConfig, semi_supervised
from trainer.evaluate.subjects import Found, SubjectOptions, find_subject
from trainer.settings import Settings, check_at_least, set_help_texts

DIRECTORY = "evaluation"
"""Folder of results, in the run's directory."""
_WAIT_SECONDS = 6 * 3600.0
"""Time for which ranks wait for each other, for example while rank 0 fits a probe."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Settings):
    """The images, the device, and the name of the result."""

    dataset: str | None = None
    """Labelled images: fashion-mnist, idx, folder, packed or inaturalist-2018. Default: the run's, or fashion-mnist."""
    data_dir: Path | None = None
    """Folder of the images. Default: the run's."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one. Under torchrun each rank takes its own."""
    bfloat16: bool = False
    """Whether the encoder computes in bfloat16 (autocast)."""
    decode_threads: int | None = None
    """Threads of each rank that decode images. Default: the rank's share of the cores."""
    name: str | None = None
    """Name of the result, NAME.json. Default: the protocol's."""
    output: Path | None = None
    """Folder of the result. Default: evaluation/ beside the run or the encoder file, otherwise in the current folder."""

    def __post_init__(self) -> None:
        known = sorted([*DATASETS, *DECODED])
        if self.dataset is not None and self.dataset not in known:
            raise ValueError(f"--dataset {self.dataset!r} is unknown or has no labels: give {', '.join(known)}")
        check_at_least(self, 1, "decode_threads")
        if self.name is not None and Path(self.name).name != self.name:
            raise ValueError(f"--name {self.name!r} is not a file's name: give letters and digits")


class Protocol(NamedTuple):
    settings: type[Settings]
    run: Callable[[Evaluation, Any], Outcome]
    summary: str


PROTOCOLS = {
    "knn": Protocol(KnnConfig, knn, "Classify by nearest neighbours among the training images' features."),
    "linear": Protocol(LinearConfig, linear, "Train a linear classifier on features of random crops, as the paper."),
    "linear-cached": Protocol(
        LinearCachedConfig,
        linear_cached,
        "Fit a regularised linear classifier to features of whole images: small sets.",
    ),
    "semi-supervised": Protocol(
        SemiSupervisedConfig, semi_supervised, "Fine-tune encoder and classifier on a few labelled images."
    ),
    "fine-tune": Protocol(FineTuneConfig, fine_tune, "Fine-tune encoder and cosine classifier on all labelled images."),
}


class Command(NamedTuple):
    """A parsed command line."""

    name: str
    subject: SubjectOptions
    options: EvaluationOptions
    settings: Settings


def parse(arguments: Sequence[str]) -> Command:
    """Parses a command line, PROTOCOL --OPTIONS; exits with status 2 if it is invalid.

    Raises:
        ValueError: options out of range.
    """
    for settings in (SubjectOptions, EvaluationOptions, *(protocol.settings for protocol in PROTOCOLS.values())):
        set_help_texts(settings)
    parsed: Command = tyro.extras.subcommand_cli_from_dict(
        {name: _parsed_by(name, protocol) for name, protocol in PROTOCOLS.items()},
        prog="python -m trainer.evaluate",
        description="Evaluate an encoder, or raw pixels for comparison, on labelled images.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return parsed


def _parsed_by(name: str, protocol: Protocol) -> Callable[..., Command]:
    def command(subject: SubjectOptions, options: EvaluationOptions, settings: Any) -> Command:
        return Command(name, subject, options, settings)

    command.__annotations__ |= {"subject": SubjectOptions, "options": EvaluationOptions, "settings": protocol.settings}
    command.__doc__ = protocol.summary
    return command


def run(command: Command) -> dict[str, Any] | None:
    """Runs an evaluation; returns the result that rank 0 wrote, None on other ranks.

    Raises:
        ValueError: subject, images and settings do not fit each other.
        OSError: the result cannot be written.
    """
    device = ComputeConfig(device=command.options.device).torch_device()
    with process_group(device, timeout_seconds=_WAIT_SECONDS) as ranks:
        found, options = find_subject(command.subject), command.options
        directory = options.output or found.directory / DIRECTORY
        name = options.name or command.name
        evaluation = Evaluation(
            subject=found.subject,
            load=lambda: _load(found, options),
            data_dir=options.data_dir,
            ranks=ranks,
            bfloat16=options.bfloat16,
            state=directory / f"{name}.partial",
            console=Console(stderr=True),
        )
        protocol = PROTOCOLS[command.name].run
        result = evaluate(evaluation, command.name, protocol, command.settings, directory / f"{name}.json")
    return result if ranks.is_first else None


def _load(found: Found, options: EvaluationOptions) -> Dataset:
    """The labelled images, of the encoder's size; a broken one is an error."""
    name = options.dataset or found.dataset or "fashion-mnist"
    directory = options.data_dir or (found.data_dir if name == found.dataset else None)
    config = found.subject.config
    size = {} if config is None else {"image_size": config.image_size}
    dataset = load_dataset(name, directory, decode_threads=options.decode_threads, **size).strict()
    dataset.check_labelled(tested=True)
    if config is not None:
        channels, side = dataset.test_images.shape[1], dataset.evaluated_side or dataset.test_images.shape[-1]
        if (channels, side) != (config.in_channels, config.image_size):
            raise ValueError(
                f"{found.subject.name} is for {config.in_channels}-channel {config.image_size} px images, but the data "
                f"set has {channels}-channel {side} px ones: choose another --dataset"
            )
    return dataset
