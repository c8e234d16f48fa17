"""Everything that one rank's training is made of, built from the settings before the first step."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.background import computed_ahead
from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.data.augment import Augmentation
from trainer.data.prefetch import Visits, views_ahead
from trainer.distributed import Ranks
from trainer.loss import cosine_softmax_loss, padded_rows, softmax_loss
from trainer.model import PICModel, build_model, check_image_size, load_encoder, set_precision_of_products
from trainer.recency import ActiveRows, RecentRows, announced
from trainer.rows.opening import open_rows
from trainer.rows.store import RowStore
from trainer.run.checkpoint import Checkpoints, load, saved_steps
from trainer.run.recorder import Report
from trainer.run.stopping import stop_signals
from trainer.schedule import RangesOrder, VisitSchedule, visit_uniforms
from weightserver import TableSpec
from weightserver.core.arrays import Float32Array
from weightserver.core.sharding import Sharding

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a rank trains with. B is the batch size, A --accumulate, V the number of views, K the active rows."""

    config: TrainConfig
    ranks: Ranks
    dataset: Dataset
    order: RangesOrder
    model: PICModel
    encoder: nn.Module
    """The model, which averages its gradients over ranks where there are several."""
    optimizer: torch.optim.Optimizer
    """Of the encoder and the head's first layer; the rows have their own, of the same settings."""
    instance_loss: Callable[..., Tensor]
    rows: RowStore
    rates: Float32Array
    """Learning rate of each step."""
    num_rows: int
    """That weights are padded to, so that no shape changes; 0 to leave them as they are."""
    steps: range
    active_rows: Iterator[ActiveRows]
    """Of each step, announced to the row store some steps ahead."""
    views: Iterator[Tensor]
    """Of each step, A × V of them: (B / A / ranks, C, side, side), made some steps ahead."""
    parts: list[tuple[int, int]]
    """(part of the batch, view), in the order of a step."""
    report: Report
    checkpoints: Checkpoints
    signals: list[int]
    """That came."""
    leaves_checkpoints: bool

    @property
    def part_size(self) -> int:
        """Images of all ranks in one part of a batch."""
        return self.config.batch_size // self.config.accumulate


def build_run(config: TrainConfig, dataset: Dataset, ranks: Ranks, stack: ExitStack) -> Run:
    """Builds the model, opens the rows, and resumes from the checkpoint to begin with, if there is one.

    Everything random is a function of seeds and the visit index, or of seed, step and rank where an encoder draws: the
    step number is all the state there is.
    """
    device = ranks.device
    set_precision_of_products("tf32" if config.precision == "tf32" else "ieee")
    if torch.are_deterministic_algorithms_enabled() != config.deterministic:  # the call alone takes seconds
        torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:  # what cuBLAS needs for it, and reads when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    num_images = len(dataset.train_images)
    num_steps = config.num_steps(num_images)
    spec = _table_spec(config, num_images)
    sharding = Sharding(spec.rows_per_block, ranks.world_size)
    order = dataset.order(config.order_seed)
    schedule = VisitSchedule(
        num_rows=num_images,
        window_size=config.window_size,
        window_stride=config.window_stride,
        seed=config.seed,
    )
    recent = RecentRows(schedule, num_active=config.num_negatives, batch_size=config.batch_size)
    model = _model(config, device)
    encoder: nn.Module = model
    if ranks.world_size > 1:
        encoder = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(
        model.parameters(),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )

    report = stack.enter_context(Report(config, num_steps, ranks, device))
    opened = stack.enter_context(open_rows(config, spec, dataset.ranges, dataset.digests, ranks=ranks, device=device))
    rows, start_step = opened.store, opened.checkpoint_step or 0
    checkpoints = Checkpoints(config, ranks, rows, opened.client, opened.history, on_saved=report.checkpoint_saved)
    if opened.checkpoint_step is None:
        checkpoints.save(0, model, optimizer)  # from now on the servers are this run's
    else:
        load(config.output / "checkpoints", opened.checkpoint_step, model, optimizer)
    report.follow(rows.counters, start_step)
    signals = stack.enter_context(stop_signals())
    if ranks.is_first:
        begins = {"step": start_step, "num_steps": num_steps, "ranks": ranks.world_size, "rows": config.rows}
        _log.info("training begins", extra=begins | {"epoch": opened.epoch})

    steps = range(start_step, num_steps)
    return Run(
        config=config,
        ranks=ranks,
        dataset=dataset,
        order=order,
        model=model,
        encoder=encoder,
        optimizer=optimizer,
        instance_loss=(
            softmax_loss if config.softmax == "plain" else partial(cosine_softmax_loss, temperature=config.temperature)
        ),
        rows=rows,
        rates=opened.rates,
        num_rows=padded_rows(config.num_negatives, spec.rows_per_block, ranks) if device.type == "cuda" else 0,
        steps=steps,
        active_rows=stack.enter_context(
            closing(announced(lambda step: recent.active(step).share(sharding, ranks.rank), rows, steps))
        ),
        views=_views(config, dataset, order, schedule, ranks, steps, stack),
        parts=list(itertools.product(range(config.accumulate), range(len(config.augmentations())))),
        report=report,
        checkpoints=checkpoints,
        signals=signals,
        leaves_checkpoints=opened.client is not None,
    )


def _views(
    config: TrainConfig,
    dataset: Dataset,
    order: RangesOrder,
    schedule: VisitSchedule,
    ranks: Ranks,
    steps: range,
    stack: ExitStack,
) -> Iterator[Tensor]:
    """This rank's views of each step's images, made ahead on its device."""
    augmentations = config.augmentations()
    part_size = config.batch_size // config.accumulate
    mine = ranks.share(part_size)

    def visits_of(step: int, part: int) -> Visits:
        """This rank's in a part of a step's batch."""
        visits = (step * config.batch_size + part * part_size + np.arange(part_size))[mine]  # (b,)
        views = np.add.outer(np.arange(len(augmentations)), visits * len(augmentations))  # (V, b)
        return Visits(
            order.images(schedule.visits(visits[0], visits[-1] + 1)),
            visit_uniforms(config.seed, views, Augmentation.num_uniforms),
        )

    images = dataset.train_images.to(ranks.device)  # uint8 (N, C, H, W)
    visits = itertools.starmap(visits_of, itertools.product(steps, range(config.accumulate)))
    visits_ahead = stack.enter_context(closing(computed_ahead(visits, ahead=2 * config.accumulate, name="visits")))
    return stack.enter_context(closing(views_ahead(images, visits_ahead, augmentations, ranks.device)))


def _model(config: TrainConfig, device: torch.device) -> PICModel:
    model = build_model(config.encoder, config.dim, seed=config.seed, head_layers=config.head_layers)
    for side in {augmentation.image_size for augmentation in config.augmentations()}:
        check_image_size(model.encoder, config.encoder, side)
    begins = not (config.resume and saved_steps(config.output / "checkpoints"))
    if begins and config.init_encoder is not None:
        encoder, found = load_encoder(config.init_encoder)
        if found != config.encoder:
            raise ValueError(f"--init-encoder {config.init_encoder} holds {found}, not {config.encoder}")
        model.encoder.load_state_dict(encoder.state_dict())
    model.encoder_in_bfloat16 = config.precision == "bfloat16"
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.compile:
        model.encoder.compile(dynamic=False)  # one program for each size of view
    return model


def _table_spec(config: TrainConfig, num_images: int) -> TableSpec:
    return TableSpec(
        num_rows=num_images,
        dim=config.dim,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        init_std=config.init_std,
        seed=config.seed,
        rows_per_block=config.rows_per_block,
        correction=config.correction,
    )
