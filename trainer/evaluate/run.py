"""Runs a parsed command: its encoder and images are loaded, and rank 0 writes the protocol's result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trainer.compute import ComputeConfig
from trainer.data import DATASETS, DECODED, Dataset, load_dataset
from trainer.data.config import SourceOptions
from trainer.data.decoded_images import DecodedImages
from trainer.display import stage
from trainer.distributed import process_group
from trainer.evaluate.command import Command
from trainer.evaluate.encoders import LoadedEncoder, encoder_of
from trainer.evaluate.evaluation import Evaluation, evaluate, state_directory
from trainer.evaluate.options import EvaluationOptions
from trainer.evaluate.protocol import check_classes, with_held_out
from trainer.evaluate.protocols import function_of
from trainer.settings import flag
from weightserver.common.logs import Remark, say
from weightserver.common.object_store import shown

DIRECTORY = "evaluation"
"""Folder of results, in the run's directory."""
_WAIT_SECONDS = 6 * 3600.0
"""Time for which ranks wait for each other, for example while rank 0 fits a probe."""


def run(command: Command) -> dict[str, Any] | None:
    """Runs an evaluation; returns the result that rank 0 wrote, None on other ranks.

    Raises:
        ValueError: encoder, images and settings do not fit each other.
        OSError: the result cannot be written.
    """
    options, protocol = command.options, command.protocol
    device = ComputeConfig(device=options.device).torch_device()
    with process_group(device, timeout_seconds=_WAIT_SECONDS) as ranks:
        with stage("loading the encoder"):
            encoder = encoder_of(command.encoder, ranks)
        if not protocol.pixels:
            encoder.require_encoder(command.name)
        with stage("loading the images"):
            images, dataset = _images(command, encoder)
        directory = options.output or encoder.directory / DIRECTORY
        name = options.name or "-".join(filter(None, (command.name, command.encoder.checkpoint)))
        identity = {
            "protocol": command.name,
            "settings": asdict(command.settings),
            "bfloat16": options.bfloat16,
            "weights": encoder.digest,
            "encoder": encoder.config and asdict(encoder.config),
            "images": images,
        }
        evaluation = Evaluation(
            encoder=encoder,
            dataset=dataset,
            images=images,
            data_dir=options.data_dir,
            ranks=ranks,
            bfloat16=options.bfloat16,
            state=state_directory(directory, name, identity),
        )
        with stage(command.name):
            run_protocol = function_of(protocol)
            result = evaluate(evaluation, command.name, run_protocol, command.settings, directory / f"{name}.json")
    return result if ranks.is_first else None


def _images(command: Command, encoder: LoadedEncoder) -> tuple[dict[str, Any], Dataset | None]:
    """What identifies the images, and the images themselves unless the protocol reads a format of its own.

    Raises:
        ValueError: images that do not fit the encoder or have no labels.
    """
    options, own_format = command.options, command.protocol.images
    if own_format:
        _refuse_reading(command, own_format)
        if options.dataset is not None:
            raise ValueError(f"--dataset {options.dataset} is not for {command.name}: give its images by --data-dir")
        return {"dataset": own_format, "data_dir": options.data_dir and str(options.data_dir)}, None
    name, directory = encoder.data(options.dataset, options.data_dir)
    reading = _reading(command, encoder, name, directory)
    loaded = _load(encoder, name, directory, options, reading)
    dataset = loaded.evaluated
    if held_out := loaded.can_hold_out and not encoder.knows_labels:
        dataset = with_held_out(dataset)
        number, fitted = len(dataset.test_images), len(dataset.train_images)
        line = f"no test images: {number:,} of {fitted + number:,} training images, drawn by class, stand for them"
        say(Remark(line, held_out=number))
    check_classes(dataset, held_out=held_out)
    digest = hashlib.sha256()
    for labels in (dataset.train_labels, dataset.test_labels):
        digest.update(labels.numpy().tobytes())
    digest.update(json.dumps([dataset.digests, dataset.test_digests]).encode())
    images: dict[str, Any] = {
        "dataset": name,
        "data_dir": directory and shown(directory),
        "train_images": len(dataset.train_images),
        "test_images": len(dataset.test_images),
        "classes": len(torch.unique(dataset.train_labels)),
        "images_digest": digest.hexdigest(),
    }
    images |= {"held_out": True} if held_out else {}
    if isinstance(dataset.train_images, DecodedImages):  # as they are read: a pack has options of its own
        images["pixels"] = dataset.train_images.options.of_pixels.given
    return images, dataset


def _reading(command: Command, encoder: LoadedEncoder, name: str, directory: Path | None) -> SourceOptions:
    """How the images are read: as is given, otherwise as in the run."""
    if name not in DECODED:
        _refuse_reading(command, name)
    return replace(encoder.reading_of(directory), **command.reading)


def _refuse_reading(command: Command, images: str) -> None:
    """Raises ValueError if options are given of how images in files are read."""
    if command.reading:
        raise ValueError(f"{', '.join(map(flag, command.reading))}: {images} is read in one way only: omit it")


def _load(
    encoder: LoadedEncoder,
    name: str,
    directory: Path | None,
    options: EvaluationOptions,
    reading: SourceOptions,
) -> Dataset:
    """The labelled images, of the encoder's size; a broken test image is an error."""
    if name not in (known := sorted([*DATASETS, *DECODED])):
        raise ValueError(f"--dataset {name!r} is unknown or has no labels: give {', '.join(known)}")
    size: dict[str, Any] = {} if encoder.config is None else {"image_size": encoder.config.image_size}
    dataset = load_dataset(name, directory, decode_threads=options.decode_threads, options=reading, **size)
    dataset = dataset.strict()
    if encoder.config is not None:
        encoder.check_images(dataset.test_images.shape[1], dataset.evaluated_side or dataset.test_images.shape[-1])
    return dataset
