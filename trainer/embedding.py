"""Computes the features of images with a trained encoder: `trainer.embed`."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from trainer.compute import ComputeConfig
from trainer.data import load_splits
from trainer.data.bucket_sources import local_source
from trainer.data.config import SourceOptions
from trainer.data.decoded_images import DecodedImages
from trainer.data.manifest import is_packed
from trainer.data.parts import WHOLE, Part, check_part_arguments
from trainer.data.source_arguments import source_options
from trainer.display import counting, shown, stage
from trainer.evaluate.encoders import LoadedEncoder, encoder_of
from trainer.evaluate.features import Advance, Frozen
from trainer.evaluate.options import EncoderOptions
from trainer.feature_files import Batch, check_output, part_output, vectors_in_parts, write_features
from trainer.ray_tasks import MOST_PARTS, on_ray
from trainer.run.directory import is_run
from trainer.stopping import exit_on_error
from weightserver.common.logs import Remark, say
from weightserver.common.object_store import absolute, is_remote
from weightserver.common.object_store import shown as shown_path

_BATCH_SIZE = 128
_IMAGES_OF_A_TASK = 1 << 16


def run(options: argparse.Namespace) -> NoReturn:
    """Runs the command. Exit status 0; 1 with one line on stderr on failure."""
    with exit_on_error("trainer.embed"):
        with shown():
            line = _embed(options)
        print(line)
    sys.exit(0)


def _embed(options: argparse.Namespace) -> str:
    """Writes the features; returns the line that says so."""
    check_part_arguments(options)
    if options.decode_threads is not None and options.decode_threads < 1:
        raise ValueError(f"--decode-threads must be at least 1, got {options.decode_threads}")
    in_parts = options.part or options.engine
    if not in_parts:
        check_output(options.output)
    elif is_remote(options.images):
        _check_parts_of_bucket(options)
    kind = "run" if is_run(options.encoder) else "encoder"
    with stage("loading the encoder and listing the images"):
        found = encoder_of(EncoderOptions(**{kind: options.encoder, "checkpoint": options.checkpoint}))
        images = images_of(found, options)
    total = sum(map(len, images.values()))
    splits = f", of the splits {', '.join(images)}" if len(images) > 1 else ""
    if options.engine:
        of = min(MOST_PARTS, -(-total // _IMAGES_OF_A_TASK))
        part_output(options.output, Part(0, of), _digest(found, images, options))
        _on_ray(_reading_of(found, options), options, of)
        left_out = _left_out(total - vectors_in_parts(options.output))
        return f"wrote {of:,} parts of {total:,} images to {options.output}{splits}{left_out}"
    part, digest, output = options.part or WHOLE, "", options.output
    if options.part:
        if not (total := len(part.range(total))):
            raise ValueError(f"part {part} has no images: give at most as many parts as there are images")
        digest = _digest(found, images, options)
        output = part_output(options.output, part, digest)
        if output.exists():
            return f"{output} is written already"
    with counting("features", total) as progress:
        device = ComputeConfig(device=options.device).torch_device()
        number, dim = write_features(output, embedded(found, images, device, progress.advance, part), digest)
    return f"wrote {number:,} vectors of {dim:,} numbers to {output}{splits}{_left_out(total - number)}"


def _left_out(number: int) -> str:
    return f", {number:,} could not be read" if number else ""


def _check_parts_of_bucket(options: argparse.Namespace) -> None:
    """Raises ValueError for images in a bucket of which each part would read all."""
    images = options.images
    if not is_packed(images) and is_remote(local_source(images, source_options(options))):
        raise ValueError(
            f"{shown_path(images)} is larger than --cache-gib, and each part would read all of it: pack it, and embed "
            "the pack"
        )


def _digest(found: LoadedEncoder, images: dict[str, DecodedImages], options: argparse.Namespace) -> str:
    """What all parts have in common: the encoder, the images, and how they are read."""
    reading = [(name, len(each), each.digests, each.options.given) for name, each in images.items()]
    content = [found.digest, str(absolute(options.images)), reading]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _on_ray(reading: SourceOptions, options: argparse.Namespace, of: int) -> None:
    """`reading` is how the images are read: a worker's folder is another, from which it may not find the run's."""
    here = {"engine": None, "address": None, "decode_threads": options.decode_threads or 1}
    settings = _absolute(vars(options)) | here | {"reading": replace(reading, **_absolute(vars(reading)))}

    def task(part: Part) -> None:
        _embed(argparse.Namespace(**settings | {"part": part}))

    with counting("parts", of) as progress:
        on_ray(task, of, progress.advance, address=options.address, gpu=options.device != "cpu")


def _absolute(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: absolute(value) if isinstance(value, Path) else value for name, value in settings.items()}


def _reading_of(found: LoadedEncoder, options: argparse.Namespace) -> SourceOptions:
    told: SourceOptions | None = getattr(options, "reading", None)
    return told or source_options(options, found.reading_of(options.images))


def images_of(found: LoadedEncoder, options: argparse.Namespace) -> dict[str, DecodedImages]:
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
        options=_reading_of(found, options),
        decode_threads=options.decode_threads,
    )


def embedded(
    found: LoadedEncoder, splits: dict[str, DecodedImages], device: torch.device, advance: Advance, part: Part = WHOLE
) -> Iterator[Batch]:
    """Paths and features of all images of a part that can be read, batch by batch; each other one is reported on
    stderr.

    Raises:
        ValueError: features that are not finite.
    """
    encoder, config = found.require_encoder("embed")
    frozen = Frozen(encoder.to(device), config.pixels, device)
    first, places = 0, part.range(sum(map(len, splits.values())))
    for split, images in splits.items():
        edge = (images.shape[-1] - config.image_size) // 2
        inner = slice(edge, edge + config.image_size)
        chosen = images.between(places.start - first, places.stop - first)
        first += len(images)
        for ids in np.split(chosen, range(_BATCH_SIZE, len(chosen), _BATCH_SIZE)):
            intact, squares, broken = images.intact(ids)
            images.broken.list(broken)
            for line in broken:
                say(Remark(f"left out: {line}", **line.values), logging.WARNING)
            if len(intact):
                yield Batch(images.paths(intact), frozen.of_pixels(squares[..., inner, inner]).cpu().numpy(), split)
            advance(len(ids))
    frozen.check()
