"""Trains on a folder of images: `pic train FOLDER`.

Surveys the images and the machine, chooses the settings that the command line does not give (`trainer.autoconfig`),
prints them with their reasons, and reports all problems together.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.arguments import CommandLine
from trainer.autoconfig import Choice, Machine, choose
from trainer.classes import classes_of
from trainer.config import TrainConfig
from trainer.cores import usable_cores
from trainer.data import DECODED, Dataset, load_dataset
from trainer.data.decoded_images import named
from trainer.data.manifest import is_packed
from trainer.data.survey import ImagesSurvey, Sample, survey
from trainer.display import shown, stage
from trainer.model import build_encoder, measure_feature_dim
from trainer.run.directory import CONFIG_FILE
from trainer.run_dataset import check_images
from trainer.settings import flag
from weightserver.common.logs import logs_json, printable
from weightserver.common.object_store import shown as shown_path
from weightserver.common.processes import usable_memory

_log = logging.getLogger(__name__)
PRESET = "images"
_NAMED = 3
"""Maximum number of broken images that are named before training."""


def images_config(command: CommandLine, *, choose_only: bool = False) -> TrainConfig:
    """The settings of a run on one's own images; prints the choices, unless `choose_only`.

    Raises:
        ValueError: a line for each problem: no images, settings out of range or that contradict images or each other.
    """
    given = {name: value for name, value in command.given.items() if value is not None}
    config = command.alone
    output, problem = _output(config, given)
    command = replace(command, given=command.given | {"output": output})
    config = command.alone
    if config.run.resume and (output / CONFIG_FILE).exists():
        return command.config()
    problems = [problem] if problem else []
    found = _found(config, given, problems)
    problems += map(str, config.problems_within_parts())
    if found is None or problems:
        raise ValueError("\n".join(problems))
    dataset, images, sample = found
    machine = _machine(config)
    choices = choose(images, machine, given)
    config = command.over(config.with_settings(**{name: choice.value for name, choice in choices.items()}))
    if problems := problems_with(config, dataset):
        raise ValueError("\n".join(problems))
    if not choose_only and int(os.environ.get("RANK", "0")) == 0:
        _say_choices(config, dataset, images, sample, choices, given)
    return config


def problems_with(config: TrainConfig, dataset: Dataset) -> list[str]:
    """A line for everything that would end a run of these settings on these images at its start."""
    problems = list(map(str, config.problems()))
    number = len(dataset.train_images)
    try:
        num_classes = classes_of(config.sampling, dataset).number
    except ValueError as error:
        problems.append(str(error))
        num_classes = number
    checks: list[Callable[[], object]] = [
        lambda: config.sampling.visit_schedule(number),
        lambda: config.check_classes(num_classes),
        lambda: config.optimization.num_steps(number),
        lambda: config.optimization.warmup_steps(number, 1),
        lambda: check_images(config, dataset),
        lambda: measure_feature_dim(build_encoder(config.model.encoder), config.model.encoder),
        config.compute.torch_device,
    ]
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def _output(config: TrainConfig, given: Container[str]) -> tuple[Path, str]:
    """The run's directory, runs/FOLDER, -2, -3, … if none is given; and a problem, or none."""
    if "output" in given:
        if (config.run.output / CONFIG_FILE).exists() and not config.run.resume:
            problem = f"--output {config.run.output} holds a run: give --resume to resume it, or another"
            return config.run.output, problem
        return config.run.output, ""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return config.run.output, "several ranks need the same directory: give --output"
    first = Path("runs") / (_folder_name(config.data.data_dir) if config.data.data_dir else PRESET)
    free, newest, number = first, first, 1
    while (free / CONFIG_FILE).exists():
        number, newest = number + 1, free
        free = first.with_name(f"{first.name}-{number}")
    return (newest if config.run.resume else free), ""


def _folder_name(source: Path) -> str:
    """Name of a folder, with its dots, or of a list without its suffix."""
    real = source.resolve()
    return real.stem if real.is_file() else real.name


def _found(
    config: TrainConfig, given: Container[str], problems: list[str]
) -> tuple[Dataset, ImagesSurvey, Sample] | None:
    """The images in --data-dir; adds a problem and returns None if there are none."""
    if config.data.data_dir is None:
        hint = "its folder is ./images: pic train ./images" if Path(PRESET).exists() else "pic train FOLDER"
        problems.append(f"a folder of images is needed: {hint}")
        return None
    kind = config.data.dataset if "dataset" in given else "packed" if is_packed(config.data.data_dir) else "folder"
    if kind not in DECODED:
        problems.append(f"--dataset {kind} is not for a folder of images: omit it, or train with the preset for it")
        return None
    try:
        with shown(), stage("listing images"):
            # only headers are read
            dataset = load_dataset(kind, config.data.data_dir, image_size=32, options=config.data)
            shared = classes_of(config.sampling, dataset).shared if config.sampling.labels else None
            return dataset, *survey(dataset, packed=kind == "packed", shared=shared)
    except (ValueError, OSError) as error:
        problems.append(str(error))
        return None


def _machine(config: TrainConfig) -> Machine:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        device = config.compute.torch_device()
    except ValueError:
        device = torch.device("cpu")  # the problem is reported with the others
    gpu_memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return Machine(
        cores=usable_cores(),
        memory_bytes=usable_memory(),
        gpu_memory_bytes=gpu_memory,
        ranks=ranks,
    )


def _say_choices(
    config: TrainConfig,
    dataset: Dataset,
    images: ImagesSurvey,
    sample: Sample,
    choices: dict[str, Choice],
    given: dict[str, Any],
) -> None:
    """Prints what was found and chosen, or logs it as one event if the log is JSON."""
    assert config.data.data_dir is not None, "otherwise there are problems"
    place = shown_path(config.data.data_dir)
    lines = [*(dataset.reading.lines() if dataset.reading else ()), *sample.lines()]
    if dataset.untested and images.num_classes and not images.num_tests:
        lines.append(dataset.untested)
    if broken := sample.broken:
        named(broken)
        others = f", and {len(broken) - _NAMED:,} more" if len(broken) > _NAMED else ""
        lines.append(
            f"broken: {', '.join(broken[:_NAMED])}{others}: training shows another image in place of each, "
            f"up to {sample.max_broken:,} (--max-broken)"
        )
    if not images.packed and not _machine(config).holds(images):
        lines.append(f"faster from a pack, in which a window lies together: pic pack {place} PACK, then pic train PACK")
    if logs_json():
        fields = {
            "data_dir": place,
            "output": str(config.run.output),
            "images": images.number,
            "classes": images.num_classes,
            "test_images": images.num_tests,
            "shorter_side": images.shorter_side,
            "notes": lines,
            "broken": list(map(str, broken)),
            "settings": {name: choice.value for name, choice in choices.items()},
            "reasons": {name: choice.reason for name, choice in choices.items()},
            "given": {name: one if isinstance(one, int | float | str) else str(one) for name, one in given.items()},
        }
        _log.info("settings chosen", extra=fields)
        return
    labels = f"{images.num_classes:,} classes" if images.num_classes else "no labels"
    tests = f", {images.num_tests:,} test images" if images.num_tests else ""
    title = f"{place}: {images.number:,} images, {labels}{tests}, {images.shorter_side} px"
    lines += [f"{f'{name} {value}':<37} {reason}" for name, value, reason in _rows(config, choices, given)]
    print(*map(printable, (title, *lines)), sep="\n  ", file=sys.stderr)


def _text(value: Any) -> str:
    """A value as it follows its flag."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _rows(config: TrainConfig, choices: dict[str, Choice], given: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Flag, value and reason of each choice, then of what is given."""
    for name, (value, reason) in choices.items():
        if isinstance(value, bool):
            yield flag(name if value else f"no_{name}"), "", reason
        else:
            yield flag(name), f"{value:g}" if isinstance(value, float) else _text(value), reason
    for name in sorted(given.keys() - {"data_dir"}):
        yield flag(name), _text(given[name]), "as given"
    if "output" not in given:
        yield "--output", str(config.run.output), "a new directory"
