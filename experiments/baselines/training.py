"""Trains and evaluates one baseline, as `trainer.loop.train` does a run of PIC."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.baselines.loop import train_method
from experiments.baselines.methods import Diet, MemoryBank, Method, MoCoV2, SimCLR, Supervised
from experiments.baselines.state import identify
from experiments.cells import PIXELS
from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.evaluate.features import FeatureSet, encoder_features, pixel_features, untrained_encoder
from trainer.evaluate.table import evaluate_features
from trainer.model import save_encoder
from trainer.run.claim import DirectoryClaim
from trainer.run.directory import ENCODER_FILE, SUMMARY_FILE, read_summary
from trainer.run.resume import resolve_resume
from trainer.run_dataset import dataset_of, with_pixel_scale
from weightserver.common.atomic_files import atomic_write, directory_lock
from weightserver.torch import Ranks

METHODS: dict[str, Callable[..., Method]] = {
    "simclr": SimCLR,
    "mocov2": MoCoV2,
    "memory-bank": MemoryBank,
    "diet": Diet,
    "supervised": Supervised,
}
"""Methods that are trained."""
REFERENCES = ("untrained", PIXELS)
"""What is evaluated without training: the encoder as it starts, and raw pixels."""


def train_baseline(method: str, config: TrainConfig, output: Path, **options: float) -> dict[str, float]:
    """Trains one of `METHODS`, or evaluates one of `REFERENCES`, and returns its summary.json.

    The run sees as many views as a run of PIC with these settings, --epochs times N times --views, in batches of
    --batch-size images: one that takes two views of an image has half as many updates as one that takes a single view.
    Images are visited in epochs. Learning rates and the kNN evaluations of --knn-every follow the share of the views
    seen; the settings of rows, window and negatives have no effect.

    `output` gets the files of a run of the trainer, and baseline.json with the method and its settings. A run that was
    killed is resumed from its newest checkpoint, to the same weights; one that has ended returns its summary.

    Args:
        method: the name of the method or reference.
        config: the settings; --output and those of the rows are replaced.
        output: the run's directory.
        options: the method's own settings, keyword-only arguments of its class in `experiments.baselines.methods`.

    Raises:
        ValueError: an unknown method or option, or settings that it does not support.
        ValueError: the directory belongs to another run.
        OSError: another process is writing the directory.
        Interrupted: a signal ended the run, after a checkpoint.
    """
    settings = settings_of(method, options)
    config = config.with_settings(output=output, rows="resident", servers=None, resume="auto")
    _check(config)
    with directory_lock(output):
        return _train_and_evaluate(method, settings, config)


def settings_of(method: str, options: dict[str, float]) -> dict[str, Any]:
    """All of a method's own settings. Raises ValueError for an unknown method or option."""
    if method not in METHODS and method not in REFERENCES:
        raise ValueError(f"unknown baseline {method!r}: choose one of {', '.join([*METHODS, *REFERENCES])}")
    known = inspect.signature(METHODS[method]).parameters.values() if method in METHODS else ()
    defaults = {parameter.name: parameter.default for parameter in known if parameter.kind is parameter.KEYWORD_ONLY}
    if unknown := sorted(options.keys() - defaults.keys()):
        raise ValueError(f"{method} has no setting {unknown[0]!r}: it has {', '.join(defaults) or 'none'}")
    return defaults | options


def _check(config: TrainConfig) -> None:
    """Raises ValueError for settings that baselines do not support."""
    config.check()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("baselines train in one process: start them without torchrun")
    if config.optimization.accumulate > 1:
        raise ValueError(
            f"--accumulate {config.optimization.accumulate} would divide the batches of baselines: omit it"
        )
    if config.sampling.labels is not None:
        raise ValueError("baselines have no shared classes: omit --labels")


def _train_and_evaluate(method: str, settings: dict[str, Any], config: TrainConfig) -> dict[str, float]:
    started = time.perf_counter()
    ranks, dataset = Ranks(device=config.compute.torch_device()), dataset_of(config)
    config = with_pixel_scale(resolve_resume(config, ranks), dataset, ranks)
    with DirectoryClaim(config, len(dataset.train_images), is_first=True) as claim:
        steps = config.optimization.num_steps(len(dataset.train_images))  # the learning rates depend on it
        identity = {"method": method, "settings": settings, "digests": dataset.digests, "steps": steps}
        identify(config.run.output, identity)
        if summary := read_summary(config.run.output):
            return summary
        if method in METHODS:
            model, summary = train_method(METHODS[method], settings, config, dataset, claim)
            summary["train_seconds"] = time.perf_counter() - started
            save_encoder(model.encoder, config.model.encoder, config.run.output / ENCODER_FILE)
            features = partial(encoder_features, model.encoder, dataset.evaluated, config.model.encoder.pixels)
        else:
            features = partial(reference_features, method, config, dataset)
        if config.report.evaluate:
            results = evaluate_features(features())
            summary |= {f"{protocol}_top1": result.top1 for protocol, result in results.items()}
        summary["seconds"] = time.perf_counter() - started
        text = json.dumps(summary, indent=2) + "\n"
        atomic_write(config.run.output / SUMMARY_FILE, lambda path: path.write_text(text))
    return summary


def reference_features(reference: str, config: TrainConfig, dataset: Dataset) -> FeatureSet:
    """Features of one of `REFERENCES`; the settings have the images' pixel scale."""
    if reference == PIXELS:
        return pixel_features(dataset.evaluated)
    encoder = untrained_encoder(config.model.encoder, dataset, config.sampling.seed)
    return encoder_features(encoder, dataset.evaluated, config.model.encoder.pixels)
