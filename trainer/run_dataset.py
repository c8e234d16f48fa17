"""The images that a run trains on: those that its settings name, or that it had before."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig
from trainer.data import Dataset, load_dataset
from trainer.data.config import FOLDER
from trainer.data.decoded_images import DecodedImages
from trainer.data.survey import checked_sample
from trainer.run.checkpoint_file import num_images_to_resume
from trainer.run.directory import CONFIG_FILE, READING_FILE, read_settings
from weightserver.common.atomic_files import atomic_write
from weightserver.common.object_store import shown
from weightserver.torch import Ranks

_log = logging.getLogger(__name__)


def dataset_of(config: TrainConfig, data_dir: Path | None = None) -> Dataset:
    """Loads the images that a run's settings name, from `data_dir` if they are there now.

    Raises:
        ValueError: as `load_dataset`; images that the encoder cannot take, or that lack the labels to evaluate with.
    """
    dataset = load_dataset(
        config.data.dataset,
        data_dir or config.data.data_dir,
        num_images=config.data.num_images,
        image_size=config.model.encoder.image_size,
        seed=config.sampling.seed,
        decode_threads=config.data.decode_threads,
        options=config.data,
    )
    check_images(config, dataset)
    return dataset


def write_reading(config: TrainConfig, dataset: Dataset) -> None:
    """Writes into the run's directory what the source of its images was read as."""
    if dataset.reading and config.data.data_dir:
        text = "\n".join([shown(config.data.data_dir), *dataset.reading.lines(), ""])
        atomic_write(
            config.run.output / READING_FILE, lambda path: path.write_text(text, "utf-8", errors="surrogateescape")
        )


def check_images(config: TrainConfig, dataset: Dataset) -> None:
    """Raises ValueError for images that the encoder cannot take, or that lack the labels to evaluate with."""
    channels = dataset.test_images.shape[1]
    if channels != config.model.encoder.in_channels:
        raise ValueError(
            f"the encoder takes {config.model.encoder.in_channels}-channel images, those of {config.data.dataset!r} "
            f"have {channels}: give --encoder.in-channels {channels}"
        )
    if config.sampling.labels is None:
        config.check_classes(len(dataset.train_images))
    if config.report.evaluate:
        dataset.check_evaluated(trained_on_labels=config.sampling.labels is not None)
    elif config.report.knn_every:
        dataset.check_labelled()


def check_sample(config: TrainConfig, dataset: Dataset, ranks: Ranks) -> None:
    """Raises ValueError on all ranks if a run that begins on files would end because too many of them are broken."""
    images = dataset.train_images
    if isinstance(images, DecodedImages) and config.data.dataset == FOLDER and not config.run.resume:
        ranks.of_first(lambda: len(checked_sample(images).broken))


def images_of_run(config: TrainConfig, dataset: Dataset, ranks: Ranks) -> Dataset:
    """The images to train on: a run that is resumed without --extend keeps its own, whatever was added since."""
    if not config.run.resume or config.run.extend:
        return dataset
    had = ranks.of_first(lambda: num_images_to_resume(config.run.output / "checkpoints", config.run.resume_step))
    before = dataset.first(had)
    if ranks.is_first and len(before.train_images) < len(dataset.train_images):
        numbers = {"images": had, "all": len(dataset.train_images)}
        _log.warning("continuing with %(images)d of %(all)d images: --extend includes all", numbers)
    return before


def check_same_images(dataset: Dataset, ranks: Ranks) -> None:
    """Raises ValueError on all ranks if some have other images, as on a machine with an older copy of them."""
    digests = list(dataset.digests)
    is_other = ranks.of_first(lambda: digests) != digests
    if ranks.max_over_ranks([float(is_other)]) != [0.0]:
        raise ValueError(
            "the ranks have different images, so that a class would be another image on each: give all machines the "
            "same --data-dir, or equal copies of it"
        )


def with_pixel_scale(config: TrainConfig, dataset: Dataset, ranks: Ranks) -> TrainConfig:
    """Fills in how pixels become numbers, where the settings leave it open, identically on every rank.

    Packed images keep the range of their pixels. The mean and deviation come from the run that is resumed; otherwise
    from the images.
    """
    if isinstance(dataset.train_images, DecodedImages):
        config = config.with_settings(**dataset.train_images.options.of_pixels.given)
    if config.model.encoder.pixel_mean is not None:
        return config
    found: dict[str, Any] = {}
    if ranks.is_first:
        found = _pixel_scale(config, dataset)
    found = json.loads(ranks.broadcast_text(json.dumps(found)))
    numbers: dict[str, Any] = {name: value and tuple(value) for name, value in found.items()}
    return config.with_settings(encoder=replace(config.model.encoder, **numbers))


def _pixel_scale(config: TrainConfig, dataset: Dataset) -> dict[str, Sequence[float] | None]:
    """pixel_mean and pixel_std as config.json has them."""
    names = ("pixel_mean", "pixel_std")
    if config.run.resume and (config.run.output / CONFIG_FILE).exists():
        stored = read_settings(config.run.output)["encoder"]
        return {name: stored[name] for name in names}
    return dict(zip(names, dataset.pixels, strict=True))
