"""Builds everything that one rank trains with, before the first step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from trainer.classes import RunClasses, classes_of
from trainer.config import TrainConfig
from trainer.coverage import coverage_warnings
from trainer.data import Dataset
from trainer.data.augment import Augmentation
from trainer.data.prefetch import Visits, views_ahead
from trainer.display import stage
from trainer.distributed import averaged_over_ranks
from trainer.evaluate.knn_probe import KnnProbe
from trainer.model import PICModel, build_model, check_image_size, load_encoder
from trainer.monitors import Monitors
from trainer.online_probe import OnlineProbe
from trainer.run.checkpoint import Checkpoints
from trainer.run.checkpoint_file import load, probe_tensors, saved_steps
from trainer.run.claim import DirectoryClaim
from trainer.run.opening import OpenRows, open_rows
from trainer.run.recorder import Recorder
from trainer.run.totals import Totals, Usage, totals_at
from trainer.schedule import visit_uniforms
from trainer.stopping import stop_signals
from weightserver import TableSpec
from weightserver.common.background import computed_ahead
from weightserver.torch import (
    Announced,
    ClassifierHead,
    LearningRates,
    Ranks,
    WindowSampler,
    beginning_norm,
    to_device,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What one rank trains with. B is the batch size, A --accumulate, V the number of views, K the active rows."""

    config: TrainConfig
    ranks: Ranks
    dataset: Dataset
    model: PICModel
    encoder: nn.Module
    """The model; with several ranks wrapped, so that its gradients are averaged over them."""
    optimizer: torch.optim.Optimizer
    """SGD of the encoder and its projection; the head applies an SGD of its own to the rows, with the same settings
    except --row-momentum."""
    head: ClassifierHead
    rates: LearningRates
    steps: range
    announcements: Iterator[Announced]
    """The classes of each step, announced to the head some steps ahead."""
    views: Iterator[Tensor]
    """A × V views for each step, (B / A / ranks, C, side, side) each, computed some steps ahead."""
    parts: list[tuple[int, int]]
    """(part of the batch, view), in the order of a step."""
    recorder: Recorder
    monitors: Monitors
    probe: OnlineProbe | None
    knn: KnnProbe | None
    checkpoints: Checkpoints
    usage: Usage
    signals: list[int]
    """Numbers of the signals received so far."""
    leaves_checkpoints: bool


@stage("building the encoder and opening the rows")
def build_run(config: TrainConfig, dataset: Dataset, ranks: Ranks, stack: ExitStack, started: float) -> Run:
    """Builds the model, opens the rows, and loads the checkpoint that the run is resumed from, if any.

    `started` is when this part of the run started, on the clock of `time.perf_counter`.

    All randomness is a function of the seeds and the visit index (for encoders that draw numbers: of seed, step and
    rank), so the step number is the only state.
    """
    config.compute.configure_torch()
    num_images = len(dataset.train_images)
    num_steps = config.optimization.num_steps(num_images)
    classes = classes_of(config.sampling, dataset)
    spec = _table_spec(config, classes.number)
    sampler = _sampler(config, classes, ranks)
    negatives = config.negative_sampler(classes.number)
    negatives.check(config.optimization.batch_size)
    model = model_of(config, ranks.device)
    encoder = averaged_over_ranks(model, ranks)
    optimizer = config.optimization.optimizer(model, ranks.device)
    probe = _online_probe(config, dataset, model, sampler, ranks)

    claim = stack.enter_context(DirectoryClaim(config, is_first=ranks.is_first))
    recorder = stack.enter_context(Recorder(config, num_images, ranks))
    opened = stack.enter_context(
        open_rows(
            config,
            spec,
            dataset.ranges,
            dataset.digests,
            classes=classes.digest,
            ranks=ranks,
            device=ranks.device,
        )
    )
    usage = _usage(config, opened, started, ranks)
    checkpoints = _checkpoints(config, ranks, opened, claim, recorder, usage, probe)
    start_step = _restore(config, opened, checkpoints, model, optimizer, probe)
    claim.prepare(start_step, num_steps)
    recorder.follow(opened.store.counters, start_step)
    signals = stack.enter_context(stop_signals(recorder.note_signal))
    if ranks.is_first and start_step < num_steps:
        _warn_of_few_classes(config, num_images, classes.number)
        for warning in coverage_warnings(config, num_images):
            _log.warning("%(line)s", warning.fields())
        beginning = {"step": start_step, "num_steps": num_steps, "ranks": ranks.world_size, "rows": config.rows.rows}
        _log.info("training begins", extra=beginning | {"session": opened.epoch})

    steps = range(start_step, num_steps)
    head = ClassifierHead.over(
        opened.store,
        spec,
        opened.rates,
        negatives=negatives,
        loss=config.loss.loss_function(),
        order=classes.rows,
        ranks=ranks,
        init_norm=beginning_norm(spec, None) if config.rows.init == "embedding" else None,
        first_step=start_step,
    )
    return Run(
        config=config,
        ranks=ranks,
        dataset=dataset,
        model=model,
        encoder=encoder,
        optimizer=optimizer,
        head=head,
        rates=opened.rates,
        steps=steps,
        announcements=stack.enter_context(closing(head.announcements(sampler, steps))),
        views=views_of_steps(config, dataset, sampler, ranks, steps, stack),
        parts=list(itertools.product(range(config.optimization.accumulate), range(len(config.augmentations())))),
        recorder=recorder,
        monitors=Monitors(model.encoder, config.loss, ranks, batch_size=config.optimization.batch_size),
        probe=probe,
        knn=knn_probe_of(config, dataset, model, ranks),
        checkpoints=checkpoints,
        usage=usage,
        signals=signals,
        leaves_checkpoints=opened.client is not None,
    )


def _warn_of_few_classes(config: TrainConfig, num_images: int, num_classes: int) -> None:
    """Warns if batches would have few classes: the window slides over neighbouring ones."""
    in_window = num_classes * config.sampling.window_size / num_images
    if config.sampling.labels is not None and in_window < min(config.optimization.batch_size, num_classes):
        _log.warning(
            "the window of %(window)d images has about %(in_window)d of %(classes)d classes at a time, fewer than a "
            "batch has images: --window-size %(images)d --window-stride %(images)d visits all at random",
            {
                "window": config.sampling.window_size,
                "in_window": round(in_window),
                "classes": num_classes,
                "images": num_images,
            },
        )


def _usage(config: TrainConfig, opened: OpenRows, started: float, ranks: Ranks) -> Usage:
    """Counts what the run uses, from the totals of the checkpoint that it is resumed from."""
    step = opened.checkpoint_step
    before = Totals() if step is None or not ranks.is_first else totals_at(config.run.output, step)
    return Usage(before, started, opened.store.counters, ranks)


def _checkpoints(
    config: TrainConfig,
    ranks: Ranks,
    opened: OpenRows,
    claim: DirectoryClaim,
    recorder: Recorder,
    usage: Usage,
    probe: OnlineProbe | None,
) -> Checkpoints:
    def on_saved() -> None:
        claim.keep()
        recorder.checkpoint_saved()

    return Checkpoints(config, ranks, opened.store, opened.client, opened.history, usage, probe, on_saved=on_saved)


def _restore(
    config: TrainConfig,
    opened: OpenRows,
    checkpoints: Checkpoints,
    model: PICModel,
    optimizer: torch.optim.Optimizer,
    probe: OnlineProbe | None,
) -> int:
    """Loads the checkpoint to resume from, or saves the first one; returns the first step."""
    if opened.checkpoint_step is None:
        checkpoints.save(0, model, optimizer)  # from now on the servers belong to this run
        return 0
    load(config.run.output / "checkpoints", opened.checkpoint_step, model, optimizer)
    if probe is not None:
        probe.restore(probe_tensors(config.run.output / "checkpoints", opened.checkpoint_step))
    return opened.checkpoint_step


def _sampler(config: TrainConfig, classes: RunClasses, ranks: Ranks) -> WindowSampler:
    """The visits of a run; a batch of the sampler is one of the parts that --accumulate makes of the run's batch."""
    return WindowSampler(
        classes.order,
        window_size=config.sampling.window_size,
        window_stride=config.sampling.window_stride,
        batch_size=config.optimization.part_size,
        batches_per_step=config.optimization.accumulate,
        seed=config.sampling.seed,
        ranks=ranks,
    )


def knn_probe_of(config: TrainConfig, dataset: Dataset, model: PICModel, ranks: Ranks) -> KnnProbe | None:
    """The kNN evaluations of --knn-every during a run, if any."""
    if not config.report.knn_every:
        return None
    return KnnProbe(model, dataset.evaluated, ranks, seed=config.sampling.seed, fraction=config.report.knn_fraction)


def _online_probe(
    config: TrainConfig, dataset: Dataset, model: PICModel, sampler: WindowSampler, ranks: Ranks
) -> OnlineProbe | None:
    if not config.report.online_probe:
        return None
    labels = dataset.train_labels  # int64 (N,)

    def labels_of(step: int) -> Tensor:
        images = np.stack([sampler.images(step, part) for part in range(config.optimization.accumulate)])  # (A, b)
        return to_device(labels[torch.from_numpy(images)], ranks.device)

    return OnlineProbe(
        model,
        int(labels.max()) + 1,
        ranks,
        labels_of=labels_of,
        num_views=config.views.views,
        num_crops=len(config.augmentations()),
        batch_size=config.optimization.batch_size,
    )


def views_of_steps(
    config: TrainConfig, dataset: Dataset, sampler: WindowSampler, ranks: Ranks, steps: range, stack: ExitStack
) -> Iterator[Tensor]:
    """This rank's views of each step's images, computed ahead on its device."""
    augmentations = config.augmentations()

    def visits_of(step: int, part: int) -> Visits:
        views = np.add.outer(np.arange(len(augmentations)), sampler.visits(step, part) * len(augmentations))  # (V, b)
        return Visits(
            sampler.images(step, part), visit_uniforms(config.sampling.seed, views, Augmentation.num_uniforms)
        )

    images = dataset.train_images.to(ranks.device)  # uint8 (N, C, H, W)
    visits = itertools.starmap(visits_of, itertools.product(steps, range(config.optimization.accumulate)))
    visits_ahead = stack.enter_context(
        closing(computed_ahead(visits, ahead=2 * config.optimization.accumulate, name="visits"))
    )
    return stack.enter_context(closing(views_ahead(images, visits_ahead, augmentations, ranks.device)))


def model_of(config: TrainConfig, device: torch.device) -> PICModel:
    """The encoder and the projection head that a run starts with, on its device.

    Raises:
        ValueError: an encoder that cannot take these views, or does not match --init-encoder.
    """
    model = build_model(
        config.model.encoder, config.model.dim, seed=config.sampling.seed, head_layers=config.model.head_layers
    )
    for side in {augmentation.image_size for augmentation in config.augmentations()}:
        check_image_size(model.encoder, config.model.encoder, side)
    starts = not (config.run.resume and saved_steps(config.run.output / "checkpoints"))
    if starts and config.model.init_encoder is not None:
        encoder, found = load_encoder(config.model.init_encoder)
        if found != config.model.encoder:
            raise ValueError(f"--init-encoder {config.model.init_encoder} holds {found}, not {config.model.encoder}")
        model.encoder.load_state_dict(encoder.state_dict())
    model.encoder_in_bfloat16 = config.compute.precision == "bfloat16"
    model = model.to(device)
    if config.compute.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.compute.compile:
        model.encoder.compile(dynamic=False)  # one program for each size of view
    return model


def _table_spec(config: TrainConfig, num_classes: int) -> TableSpec:
    return TableSpec(
        num_rows=num_classes,
        dim=config.model.dim,
        momentum=config.optimization.momentum if config.rows.row_momentum is None else config.rows.row_momentum,
        weight_decay=config.optimization.weight_decay,
        init_std=config.rows.init_std,
        seed=config.sampling.seed,
        rows_per_block=config.rows.rows_per_block,
        correction=config.rows.correction,
        dtype=config.rows.row_precision,
    )
