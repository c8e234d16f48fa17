"""Computes the features of images with a trained encoder: `trainer.embed`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from typing import NoReturn

import torch

from trainer.compute import ComputeConfig
from trainer.data import load_splits
from trainer.data.decoded_images import DecodedImages
from trainer.data.source_arguments import source_options
from trainer.display import counting, shown, stage
from trainer.evaluate.features import Advance, Frozen
from trainer.evaluate.options import SubjectOptions
from trainer.evaluate.subjects import Subject, load_subject
from trainer.feature_files import Batch, check_output, write_features
from trainer.run.directory import is_run
from trainer.stopping import exit_on_error
from weightserver.common.logs import Remark, say

_BATCH_SIZE = 128


def run(options: argparse.Namespace) -> NoReturn:
    """Runs the command. Exit status 0; 1 with one line on stderr on failure."""
    with exit_on_error("trainer.embed"):
        with shown():
            line = _embed(options)
        print(line)
    sys.exit(0)


def _embed(options: argparse.Namespace) -> str:
    """Writes the features; returns the line that says so."""
    check_output(options.output)
    kind = "run" if is_run(options.encoder) else "encoder"
    with stage("loading the encoder and listing the images"):
        found = load_subject(SubjectOptions(**{kind: options.encoder, "checkpoint": options.checkpoint}))
        images = images_of(found, options)
    total = sum(map(len, images.values()))
    with counting("features", total) as progress:
        batches = embedded(found, images, ComputeConfig(device=options.device).torch_device(), progress.advance)
        number, dim = write_features(options.output, batches)
    left_out = f", {total - number:,} could not be read" if number < total else ""
    splits = f", of the splits {', '.join(images)}" if len(images) > 1 else ""
    return f"wrote {number:,} vectors of {dim:,} numbers to {options.output}{splits}{left_out}"


def images_of(found: Subject, options: argparse.Namespace) -> dict[str, DecodedImages]:
    """All images of a folder, list or pack by their splits, as squares for the encoder.

    Raises:
        ValueError: no images, or an encoder of grey ones.
    """
    _, config = found.require_encoder("embed")
    if config.in_channels != 3:
        raise ValueError(f"{found.name} takes grey images, but files are decoded in colour: give another encoder")
    return load_splits(
        options.images,
        image_size=config.image_size,
        options=source_options(options, found.reading_of(options.images)),
        decode_threads=options.decode_threads,
        background=options.background or found.images.background,
    )


def embedded(
    found: Subject, splits: dict[str, DecodedImages], device: torch.device, advance: Advance
) -> Iterator[Batch]:
    """Paths and features of all images that can be read, batch by batch; each other one is reported on stderr.

    Raises:
        ValueError: features that are not finite.
    """
    encoder, config = found.require_encoder("embed")
    frozen = Frozen(encoder.to(device), config.pixels, device)
    for split, images in splits.items():
        edge = (images.shape[-1] - config.image_size) // 2
        inner = slice(edge, edge + config.image_size)
        for ids in torch.split(torch.arange(len(images)), _BATCH_SIZE):
            intact, squares, broken = images.intact(ids.numpy())
            for line in broken:
                say(Remark(f"left out: {line}", **line.values), logging.WARNING)
            if len(intact):
                yield Batch(images.paths(intact), frozen.of_pixels(squares[..., inner, inner]).cpu().numpy(), split)
            advance(len(ids))
    frozen.check()
