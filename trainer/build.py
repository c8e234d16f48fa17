"""Builds everything that one rank trains with, before the first step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from trainer.classes import RunClasses, classes_of
from trainer.config import TrainConfig
from trainer.coverage import coverage_warnings
from trainer.data import Dataset
from trainer.data.augment import Augmentation
from trainer.data.decoded_images import DecodedImages
from trainer.data.prefetch import Visits, views_ahead
from trainer.display import stage
from trainer.distributed import averaged_over_ranks
from trainer.evaluate.knn_probe import KnnProbe
from trainer.model import PICModel, build_model, library_model, measure_feature_dim
from trainer.monitors import Monitors
from trainer.observing import Observer
from trainer.run.checkpoint import Checkpoints
from trainer.run.checkpoint_file import file_path, restore
from trainer.run.claim import DirectoryClaim
from trainer.run.opening import Opened, head_of, open_head
from trainer.run.recorder import Recorder
from trainer.run.run_images import RunImages
from trainer.run.totals import Totals, Usage, totals_at
from trainer.schedule import visit_uniforms
from trainer.stopping import stop_signals
from weightserver.common.background import computed_ahead
from weightserver.core.arrays import Float32Array
from weightserver.torch import (
    Announced,
    ClassifierHead,
    Ranks,
    WindowSampler,
)

_log = logging.getLogger(__name__)
_VISITS_AHEAD = 1 << 16
"""Most visits whose images are read ahead."""


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
    """Optimizer of the encoder and its projection; the head applies an SGD of its own to the rows."""
    head: ClassifierHead
    rates: Float32Array
    """The learning rate of each update."""
    steps: range
    announcements: Iterator[Announced]
    """The classes of each step, announced to the head some steps ahead."""
    views: Iterator[Tensor]
    """A × V views for each step, (B / A / ranks, C, side, side) each, computed some steps ahead."""
    parts: list[tuple[int, int]]
    """(part of the batch, view), in the order of a step."""
    observer: Observer
    checkpoints: Checkpoints
    usage: Usage
    signals: list[int]
    """Numbers of the signals received so far."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """See `Recorder.stage`."""
        return self.observer.recorder.stage(name)


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
    head = head_of(config, classes, ranks)
    sampler = _sampler(config, classes, head)
    model = model_of(config, ranks)
    encoder = averaged_over_ranks(model, ranks)
    optimizer = config.optimization.optimizer_of(model, ranks.device)

    claim = stack.enter_context(DirectoryClaim(config, num_images, is_first=ranks.is_first))
    recorder = Recorder(config, num_images, ranks, stack)
    opened = open_head(stack.enter_context(head), config, dataset, classes, ranks)
    images = opened.images
    usage = Usage(_totals_before(config, opened.step, ranks), started, head.counters, ranks)

    def on_saved() -> None:
        claim.keep()
        recorder.checkpoint_saved()

    checkpoints = Checkpoints(config, ranks, head, images, usage, on_saved=on_saved)
    start_step = _restore(config, opened, checkpoints, model, optimizer)
    claim.prepare(start_step, num_steps)
    recorder.follow(head.counters, start_step)
    rates = images.learning_rates(config.optimization)
    signals = stack.enter_context(stop_signals(recorder.note_signal))
    if ranks.is_first and start_step < num_steps:
        _warn_of_few_classes(config, classes)
        for warning in coverage_warnings(config, num_images):
            _log.warning("%(line)s", warning.fields())
        _warn_of_a_long_warmup(config, images, num_steps)
        beginning = {"step": start_step, "num_steps": num_steps, "ranks": ranks.world_size, "rows": config.rows.rows}
        _log.info("training begins", extra=beginning | {"session": head.epoch})

    steps = range(start_step, num_steps)
    return Run(
        config=config,
        ranks=ranks,
        dataset=dataset,
        model=model,
        encoder=encoder,
        optimizer=optimizer,
        head=head,
        rates=rates,
        steps=steps,
        announcements=head.announcements(steps),
        views=views_of_steps(config, dataset, sampler, ranks, steps, stack),
        parts=list(itertools.product(range(config.optimization.accumulate), range(len(config.augmentations())))),
        observer=Observer(
            config,
            num_images,
            recorder,
            Monitors(model.encoder, config.loss, ranks, batch_size=config.optimization.batch_size),
            knn_probe_of(config, dataset, model, ranks),
            steps,
        ),
        checkpoints=checkpoints,
        usage=usage,
        signals=signals,
    )


def _warn_of_few_classes(config: TrainConfig, classes: RunClasses) -> None:
    """Warns if batches would have few classes: the window slides over neighbouring ones."""
    if (order := classes.shared) is None:
        return
    size = config.sampling.window_size
    if (fewest := order.fewest_classes(size)) < min(config.optimization.batch_size, classes.number):
        _log.warning(
            "some windows of %(window)d images have only %(fewest)d of %(classes)d classes, fewer than a batch has "
            "images: --window-size %(images)d --window-stride %(images)d visits all at random",
            {"window": size, "fewest": fewest, "classes": classes.number, "images": order.num_images},
        )


def _warn_of_a_long_warmup(config: TrainConfig, images: RunImages, num_steps: int) -> None:
    """Warns if the run ends before its warm-up does."""
    if (warmup_steps := config.optimization.warmup_steps(images.num_first, num_steps)) > num_steps:
        _log.warning(
            "the run's %(steps)d steps end within its warm-up of %(warmup_steps)d: give fewer --warmup-epochs to reach "
            "--learning-rate %(learning_rate)g",
            {"steps": num_steps, "warmup_steps": warmup_steps, "learning_rate": config.optimization.learning_rate},
        )


def _totals_before(config: TrainConfig, saved_step: int | None, ranks: Ranks) -> Totals:
    """What the run used up to the checkpoint that it is resumed from."""
    return Totals() if saved_step is None or not ranks.is_first else totals_at(config.run.output, saved_step)


def _restore(
    config: TrainConfig,
    opened: Opened,
    checkpoints: Checkpoints,
    model: PICModel,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Restores the checkpoint to resume from; returns the first step. A new run saves its first checkpoint, so that
    from now on the servers belong to it, and one with more images the same with these."""
    step = opened.step or 0
    if opened.step is not None:
        restore(opened.tensors, file_path(config.run.output / "checkpoints", step), model, optimizer)
    if opened.step is None or opened.has_grown:
        checkpoints.save(step, model, optimizer)
    return step


def _sampler(config: TrainConfig, classes: RunClasses, head: ClassifierHead) -> WindowSampler:
    """The visits of a run; a batch of the sampler is one of the parts that --accumulate makes of the run's batch."""
    return head.sampler(
        batch_size=config.optimization.part_size,
        window_size=config.sampling.window_size,
        window_stride=config.sampling.window_stride,
        batches_per_step=config.optimization.accumulate,
        seed=config.sampling.seed,
        classes=classes.shared,
    )


def knn_probe_of(config: TrainConfig, dataset: Dataset, model: PICModel, ranks: Ranks) -> KnnProbe | None:
    """The kNN evaluations of --knn-every during a run, if any."""
    if not config.report.knn_every:
        return None
    return KnnProbe(model, dataset.evaluated, ranks, seed=config.sampling.seed)


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

    def parts() -> Iterator[tuple[int, int]]:
        return ((step, part) for step in steps for part in range(config.optimization.accumulate))

    visits: Iterator[Visits] = itertools.starmap(visits_of, parts())
    if isinstance(images, DecodedImages):
        # a window moves by its stride: what it comes to is read while it stands
        ahead = min(sampler.schedule.window_stride, _VISITS_AHEAD) // sampler.batch_size
        reading = images.read_ahead(itertools.starmap(sampler.images, parts()), ahead)
        visits = (visit for _, visit in zip(reading, visits, strict=True))
    visits_ahead = stack.enter_context(
        closing(computed_ahead(visits, ahead=2 * config.optimization.accumulate, name="visits"))
    )
    return stack.enter_context(closing(views_ahead(images, visits_ahead, augmentations, ranks.device)))


def model_of(config: TrainConfig, ranks: Ranks) -> PICModel:
    """The encoder and the projection head that a run starts with, on its device. All ranks call it.

    Raises:
        ValueError: an encoder that cannot take these views.
    """
    model = build_model(
        config.model.encoder,
        config.model.dim,
        seed=config.sampling.seed,
        head_layers=config.model.head_layers,
        embedding_norm=config.model.embedding_norm,
    )
    if getattr(library_model(model.encoder), "aux_logits", False):  # torchvision's GoogLeNet and Inception
        raise ValueError(
            f"encoder {config.model.encoder.name!r} has further classifiers while it is trained: give "
            "--encoder.options aux_logits=False"
        )
    for side in {augmentation.image_size for augmentation in config.augmentations()}:
        num_features = measure_feature_dim(model.encoder, replace(config.model.encoder, image_size=side))
        if num_features != model.feature_dim:
            raise ValueError(
                f"encoder {config.model.encoder.name!r} has {num_features} features for {side} px views and "
                f"{model.feature_dim} for {config.model.encoder.image_size} px images: give views of their size"
            )
    model.encoder_in_bfloat16 = config.compute.precision == "bfloat16"
    model.to(ranks.device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # makes convolutions faster
    if config.compute.compile:
        # one program for each size of view, on a GPU launched as one graph, unless gradients are accumulated: its next
        # launch overwrites those of the last
        is_graph = ranks.device.type == "cuda" and config.optimization.accumulate * config.views.views == 1
        model.encoder.compile(dynamic=False, mode="reduce-overhead" if is_graph else None)
    return model
