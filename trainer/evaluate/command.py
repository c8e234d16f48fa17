"""The command line of evaluations: options common to all protocols, and those of each."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro

from trainer.compute import ComputeConfig
from trainer.data import DATASETS, DECODED, Dataset, load_dataset
from trainer.display import stage
from trainer.distributed import process_group
from trainer.evaluate.classifiers import ClassifierConfig
from trainer.evaluate.evaluation import Evaluation, evaluate, state_directory
from trainer.evaluate.protocol import check_classes
from trainer.evaluate.protocols import PROTOCOLS
from trainer.evaluate.subjects import FoundSubject, SubjectOptions, load_subject
from trainer.settings import Settings, check_at_least, set_help_texts
from trainer.wrong_arguments import parsed_or_exit
from weightserver.common.logs import LogFormat, Remark, say

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
    background: str | None = None
    """What transparent pixels show: a colour, or none for the colours that they hide. Default: as in the run, or
    white."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one. Under torchrun each rank takes its own."""
    bfloat16: bool = False
    """Whether the encoder computes in bfloat16 (autocast)."""
    decode_threads: int | None = None
    """Threads of each rank that decode images. Default: the rank's share of the cores."""
    name: str | None = None
    """Name of the result, NAME.json. Default: the protocol's, followed by --checkpoint if given."""
    log_format: LogFormat = "text"
    """Format of the log."""
    output: Path | None = None
    """Folder of the result. Default: evaluation/ in the run's directory, or beside the encoder's file."""

    def check(self) -> None:
        known = sorted([*DATASETS, *DECODED])
        if self.dataset is not None and self.dataset not in known:
            raise ValueError(f"--dataset {self.dataset!r} is unknown or has no labels: give {', '.join(known)}")
        check_at_least(self, 1, "decode_threads")
        if self.name is not None and not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ValueError(f"--name {self.name!r} is not a file's name: give letters and digits")


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
    name = arguments[0] if arguments else ""
    if name not in PROTOCOLS and name not in ("-h", "--help"):
        near = difflib.get_close_matches(name, PROTOCOLS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(PROTOCOLS)}"
        raise ValueError(f"unknown protocol {name!r}: {hint}")
    of_protocols = (protocol.settings for protocol in PROTOCOLS.values())
    for settings in (SubjectOptions, EvaluationOptions, ClassifierConfig, *of_protocols):
        set_help_texts(settings)

    def parse(options: list[str]) -> Command:
        parsed: Command = tyro.extras.subcommand_cli_from_dict(
            {name: _parsed_by(name, protocol.settings, protocol.summary) for name, protocol in PROTOCOLS.items()},
            prog="pic evaluate",
            description="Evaluate an encoder, or raw pixels for comparison, on labelled images.",
            args=[name, *options],
            config=(tyro.conf.OmitArgPrefixes,),
        )
        return parsed

    parsed = parsed_or_exit(parse, _without_commas(arguments[1:]), command="trainer.evaluate")
    for part in (parsed.subject, parsed.options, parsed.settings):
        part.check()
    return parsed


def _without_commas(arguments: Sequence[str]) -> list[str]:
    """Splits numbers that are separated by commas, --learning-rates 30,10,3, which tyro takes as separate arguments."""
    found = []
    for argument in arguments:
        name, is_assigned, numbers = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if re.fullmatch(r"[\d.eE+-]+(,[\d.eE+-]+)+", numbers):
            found += [name, *numbers.split(",")] if is_assigned else numbers.split(",")
        else:
            found.append(argument)
    return found


def _parsed_by(name: str, settings: type[Settings], summary: str) -> Callable[..., Command]:
    def command(subject: SubjectOptions, general: EvaluationOptions, protocol: Any) -> Command:
        return Command(name, subject, general, protocol)

    command.__annotations__["protocol"] = settings
    command.__annotations__ |= {"subject": SubjectOptions, "general": EvaluationOptions}  # not their names as text
    command.__doc__ = summary
    return command


def run(command: Command) -> dict[str, Any] | None:
    """Runs an evaluation; returns the result that rank 0 wrote, None on other ranks.

    Raises:
        ValueError: subject, images and settings do not fit each other.
        OSError: the result cannot be written.
    """
    device = ComputeConfig(device=command.options.device).torch_device()
    with process_group(device, timeout_seconds=_WAIT_SECONDS) as ranks:
        options = command.options
        with stage("loading the encoder"):
            found = load_subject(command.subject, ranks)
        for note in found.notes if ranks.is_first else ():
            say(Remark(note))
        protocol, subject = PROTOCOLS[command.name], found.subject
        if not protocol.pixels:
            subject.require_encoder(command.name)
        with stage("loading the images"):
            images, load = _images(command, found)
        directory = options.output or found.directory / DIRECTORY
        name = options.name or "-".join(filter(None, (command.name, command.subject.checkpoint)))
        identity = {
            "protocol": command.name,
            "settings": asdict(command.settings),
            "bfloat16": options.bfloat16,
            "weights": subject.digest,
            "encoder": found.config and asdict(found.config),
            "images": images,
        }
        evaluation = Evaluation(
            subject=subject,
            load=load,
            images=images,
            data_dir=options.data_dir,
            ranks=ranks,
            bfloat16=options.bfloat16,
            state=state_directory(directory, name, identity),
        )
        with stage(command.name):
            result = evaluate(evaluation, command.name, protocol.run, command.settings, directory / f"{name}.json")
    return result if ranks.is_first else None


def _images(command: Command, found: FoundSubject) -> tuple[dict[str, Any], Callable[[], Dataset]]:
    """What identifies the images, and how labelled images of no own format are loaded.

    Raises:
        ValueError: images that do not fit the encoder or have no labels.
    """
    options, own_format = command.options, PROTOCOLS[command.name].images
    if own_format:
        if options.dataset is not None:
            raise ValueError(f"--dataset {options.dataset} is not for {command.name}: give its images by --data-dir")
        return {"dataset": own_format, "data_dir": options.data_dir and str(options.data_dir)}, _no_labelled_images
    name, directory = found.data(options.dataset, options.data_dir)
    dataset = _load(found, name, directory, options)
    if PROTOCOLS[command.name].labelled:
        check_classes(dataset)
    digest = hashlib.sha256()
    for labels in (dataset.train_labels, dataset.test_labels):
        digest.update(labels.numpy().tobytes())
    digest.update(json.dumps([dataset.digests, dataset.test_digests]).encode())
    images = {
        "dataset": name,
        "data_dir": directory and str(directory),
        "train_images": len(dataset.train_images),
        "test_images": len(dataset.test_images),
        "classes": len(torch.unique(dataset.train_labels)),
        "images_digest": digest.hexdigest(),
    }
    if name in DECODED:
        images["background"] = _background(found, options)
    return images, lambda: dataset


def _background(found: FoundSubject, options: EvaluationOptions) -> str:
    return found.background if options.background is None else options.background


def _no_labelled_images() -> Dataset:
    raise NotImplementedError("the protocol reads images of its own format")


def _load(found: FoundSubject, name: str, directory: Path | None, options: EvaluationOptions) -> Dataset:
    """The labelled images, of the encoder's size; a broken test image is an error."""
    size: dict[str, Any] = {} if found.config is None else {"image_size": found.config.image_size}
    background = _background(found, options)
    dataset = load_dataset(name, directory, decode_threads=options.decode_threads, background=background, **size)
    dataset = dataset.strict()
    if found.config is not None:
        channels, side = dataset.test_images.shape[1], dataset.evaluated_side or dataset.test_images.shape[-1]
        if (channels, side) != (found.config.in_channels, found.config.image_size):
            raise ValueError(
                f"{found.name} is for {found.config.in_channels}-channel {found.config.image_size} px images, but the "
                f"data set has {channels}-channel {side} px ones: choose another --dataset"
            )
    return dataset
