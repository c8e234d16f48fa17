"""The training loop."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.background import computed_ahead
from trainer.config import TrainConfig
from trainer.data import Dataset, load_dataset
from trainer.data.augment import Augmentation
from trainer.data.prefetch import Visits, views_ahead
from trainer.distributed import Ranks, averaging_gradients, process_group
from trainer.evaluate import ProbeResult, encoder_features, evaluate_features
from trainer.evaluate.knn import held_out_knn_top1
from trainer.loss import cosine_softmax_loss, padded, padded_rows, softmax_loss
from trainer.model import (
    PICModel,
    build_model,
    check_image_size,
    load_encoder,
    save_encoder,
    set_precision_of_products,
)
from trainer.recency import ActiveRows, RecentRows, announced
from trainer.rows.opening import images_of_run, open_rows
from trainer.run.checkpoint import Checkpoints, load, resolve_resume, saved_steps, with_pixel_scale
from trainer.run.directory import ENCODER_FILE, SUMMARY_FILE
from trainer.run.prometheus import peak_gpu_bytes
from trainer.run.recorder import Report
from trainer.run.stopping import Interrupted, stop_signals
from trainer.schedule import RangesOrder, VisitSchedule, forward_seed, visit_uniforms
from trainer.transfer import to_device
from weightserver import TableSpec
from weightserver.common.atomic_files import atomic_write
from weightserver.core.sharding import Sharding

_log = logging.getLogger(__name__)

_NUM_WATCHED = 10_000
"""Training images that the kNN evaluations during training use."""
_SIGNAL_STEPS = 4
"""Steps between those at which several ranks tell each other of signals; one rank looks at each."""


@dataclass(frozen=True)
class TrainResult:
    """What a run ended with; the same as its summary.json and encoder.safetensors."""

    dataset: Dataset
    model: PICModel
    summary: dict[str, Any]
    results: dict[str, ProbeResult]
    """Protocol to result; empty without --evaluate, and on other ranks than the first."""
    is_first: bool = True
    """Whether this is the rank that tells."""


def train(config: TrainConfig, *, on_step: Callable[[int], None] = lambda step: None) -> TrainResult:
    """Trains and evaluates as `config` says, on as many ranks as torchrun started; rank 0 fills the run's directory.

    `on_step` is called with the number of each step before it begins, on every rank: for benchmarks and tests.

    Raises:
        ValueError: settings that do not fit the data, a directory or a table that another run used.
        WeightServerError: the weight servers failed for longer than the client tries.
        Interrupted: a signal ended the run, behind a checkpoint.
    """
    config.check()
    started = time.perf_counter()
    device = _device(config.device)
    dataset = dataset_of(config)
    channels = dataset.test_images.shape[1]
    if channels != config.encoder.in_channels:
        raise ValueError(
            f"the encoder takes {config.encoder.in_channels}-channel images, those of {config.dataset!r} have "
            f"{channels}: give --encoder.in-channels {channels}"
        )
    if config.evaluate or config.knn_every:
        dataset.check_labelled(tested=config.evaluate)
    timeout_seconds = config.rank_timeout_seconds + config.retry_seconds
    with process_group(device, timeout_seconds=timeout_seconds, agreed=(Interrupted,)) as ranks:
        config = resolve_resume(config, ranks)
        dataset = images_of_run(config, dataset, ranks)
        config = with_pixel_scale(config, dataset, ranks)
        model, summary = _train_rank(config, dataset, ranks, on_step)
    summary["train_seconds"] = time.perf_counter() - started
    results: dict[str, ProbeResult] = {}
    if ranks.is_first:
        save_encoder(model.encoder, config.encoder, config.output / ENCODER_FILE)
        if config.evaluate:
            results = evaluate_features(encoder_features(model.encoder, dataset, config.encoder.pixels))
        summary |= {f"{protocol}_top1": result.top1 for protocol, result in results.items()}
        summary["seconds"] = time.perf_counter() - started
        text = json.dumps(summary, indent=2) + "\n"
        atomic_write(config.output / SUMMARY_FILE, lambda path: path.write_text(text))
    return TrainResult(dataset, model, summary, results, is_first=ranks.is_first)


def dataset_of(config: TrainConfig) -> Dataset:
    """Loads the images that a run's settings name. Raises ValueError as `load_dataset` does."""
    return load_dataset(
        config.dataset,
        config.data_dir,
        num_images=config.num_images,
        image_size=config.encoder.image_size,
        seed=config.seed,
        decode_threads=config.decode_threads,
    )


def _train_rank(
    config: TrainConfig, dataset: Dataset, ranks: Ranks, on_step: Callable[[int], None]
) -> tuple[PICModel, dict[str, Any]]:
    """One rank's part of the training: a slice of every batch, and a share of the rows."""
    device = ranks.device
    set_precision_of_products("tf32" if config.precision == "tf32" else "ieee")
    if torch.are_deterministic_algorithms_enabled() != config.deterministic:  # the call alone takes seconds
        torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:  # what cuBLAS needs for it, and reads when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    images = dataset.train_images.to(device)  # uint8 (N, C, H, W)
    num_images, batch_size = len(images), config.batch_size
    num_steps = config.num_steps(num_images)
    spec = _table_spec(config, num_images)

    # Everything random is a function of seeds and the visit index, or of seed, step and rank where an encoder draws:
    # the step number is all the state there is.
    order = dataset.order(config.order_seed)
    schedule = VisitSchedule(
        num_rows=num_images,
        window_size=config.window_size,
        window_stride=config.window_stride,
        seed=config.seed,
    )
    recent = RecentRows(schedule, num_active=config.num_negatives, batch_size=batch_size)
    sharding = Sharding(spec.rows_per_block, ranks.world_size)
    part_size = batch_size // config.accumulate
    mine = ranks.share(part_size)  # this rank's slice of each part of a batch
    head_rows = padded_rows(config.num_negatives, spec.rows_per_block, ranks) if device.type == "cuda" else 0
    augmentations = config.augmentations()
    instance_loss = (
        softmax_loss if config.softmax == "plain" else partial(cosine_softmax_loss, temperature=config.temperature)
    )
    model = _model(config, device)
    parallel: nn.Module = model
    if ranks.world_size > 1:
        parallel = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(
        model.parameters(),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=device.type == "cuda",
    )

    with ExitStack() as stack:
        report = stack.enter_context(Report(config, num_steps, ranks, device))
        opened = stack.enter_context(
            open_rows(config, spec, dataset.ranges, dataset.digests, ranks=ranks, device=device)
        )
        rows, rates, start_step = opened.store, opened.rates, opened.checkpoint_step or 0
        checkpoints = Checkpoints(config, ranks, rows, opened.client, opened.history, on_saved=report.checkpoint_saved)
        if opened.checkpoint_step is None:
            checkpoints.save(0, model, optimizer)  # from now on the servers are this run's
        else:
            load(config.output / "checkpoints", opened.checkpoint_step, model, optimizer)
        report.follow(rows.counters, start_step)
        signals = stack.enter_context(stop_signals())
        if ranks.is_first:
            ours = {"step": start_step, "num_steps": num_steps, "ranks": ranks.world_size, "rows": config.rows}
            _log.info("training begins", extra=ours | {"epoch": opened.epoch})

        def active_share(step: int) -> ActiveRows:
            return recent.active(step).share(sharding, ranks.rank)

        memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        parts = list(itertools.product(range(config.accumulate), range(len(augmentations))))

        def visits_of(step: int, part: int) -> Visits:
            """This rank's in a part of a step's batch."""
            visits = (step * batch_size + part * part_size + np.arange(part_size))[mine]  # (b,)
            views = np.add.outer(np.arange(len(augmentations)), visits * len(augmentations))  # (V, b)
            return Visits(
                order.images(schedule.visits(visits[0], visits[-1] + 1)),
                visit_uniforms(config.seed, views, Augmentation.num_uniforms),
            )

        steps = range(start_step, num_steps)
        visits = itertools.starmap(visits_of, itertools.product(steps, range(config.accumulate)))
        visits_ahead = stack.enter_context(closing(computed_ahead(visits, ahead=2 * config.accumulate, name="visits")))
        views = stack.enter_context(closing(views_ahead(images, visits_ahead, augmentations, device)))
        upcoming = stack.enter_context(closing(announced(active_share, rows, steps)))
        for step, active in zip(steps, upcoming, strict=True):
            on_step(step)
            _seed_generators(forward_seed(config.seed, step, ranks.rank), device)
            optimizer.zero_grad()
            weight: Tensor | None = None
            loss = torch.zeros((), device=device)
            labels = torch.split(to_device(active.labels, device), part_size)  # each (B / accumulate,)
            for part, view in parts:
                report.stage("data")
                seen = next(views).contiguous(memory_format=memory_format)  # (b, C, side, side)

                with averaging_gradients(parallel, (part, view) == parts[-1]):
                    report.stage("forward")
                    features = parallel(seen)  # (b, D)
                    if weight is None:  # behind the encoder's work, while they may still come
                        report.stage("rows")
                        weight = padded(rows.weights(active.rows, step=step), head_rows)  # (K of this rank, D)
                        weight.requires_grad_()
                        report.stage("forward")
                    classes = weight if view < config.views else weight.detach()  # small crops move no row
                    part_loss = instance_loss(features, classes, labels[part], ranks=ranks, num_rows=len(active.rows))
                    part_loss /= len(parts)
                    report.stage("backward")
                    part_loss.backward()  # type: ignore[no-untyped-call]
                loss += part_loss.detach()

            assert weight is not None
            assert weight.grad is not None
            report.stage("rows")
            rows.apply_gradients(active.rows, weight.grad[: len(active.rows)], step=step)
            report.stage("optimizer")
            optimizer.param_groups[0]["lr"] = float(rates[step])
            optimizer.step()

            report.stage("other")
            last = step + 1 == num_steps
            if last or (step + 1) % config.log_every == 0:
                record = report.measure(step, loss.item(), float(rates[step]), len(active.rows))
                if ranks.is_first and _is_due(config.knn_every * num_images / batch_size, step, config.log_every, last):
                    record["knn_top1"] = _knn_probe(model, dataset, order)
                if not math.isfinite(record["loss"]):
                    raise ValueError(f"the loss is {record['loss']} at step {step}: try a lower --learning-rate")
                report.write(record)
            if not last and (ranks.world_size == 1 or (step + 1) % _SIGNAL_STEPS == 0):
                (signalled,) = ranks.max_over_ranks([max(signals, default=0)])  # ranks hear of it at different steps
                if signalled:
                    checkpoints.save(step + 1, model, optimizer)
                    hint = "--resume goes on there" if opened.client else "dense rows leave no checkpoint"
                    raise Interrupted(int(signalled), f"stopped by a signal after {step + 1} steps: {hint}")
            if config.checkpoint_every and (step + 1) % config.checkpoint_every == 0 and not last:
                checkpoints.save(step + 1, model, optimizer)
            report.stage("rows")  # the next step's are announced
        rows.flush()  # every update is durable
        (signalled,) = ranks.max_over_ranks([max(signals, default=0)])
        if signalled:
            raise Interrupted(int(signalled), "stopped by a signal behind its last step: --resume ends the run")
        moved = ranks.sum_over_ranks([rows.counters.fetched_rows, rows.counters.pushed_rows])
        ranks.barrier()  # nobody stops the servers before that

    return model, {
        "steps": num_steps,
        "epochs": num_steps * batch_size / num_images,
        "loss": record["loss"],
        "fetched_rows": round(moved[0]),
        "pushed_rows": round(moved[1]),
        "peak_memory_bytes": _peak_memory_bytes(device),
    }


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


def _seed_generators(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, but those alone that the encoder may draw from: that of the CPU and of `device`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


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


def _is_due(every_steps: float, step: int, log_every: int, last: bool) -> bool:
    """Whether a multiple of `every_steps` lies between this logged step and the one before."""
    if every_steps <= 0:
        return False
    return last or (step + 1) // every_steps > max(0, step + 1 - log_every) // every_steps


def _knn_probe(model: PICModel, dataset: Dataset, order: RangesOrder) -> float:
    """kNN top-1 of held-out training images, in percent; those of the first rows, which are of all classes."""
    images = torch.from_numpy(order.images(np.arange(min(_NUM_WATCHED, len(dataset.train_images)))))
    watched = replace(
        dataset,
        train_images=dataset.train_images[images],
        train_labels=dataset.train_labels[images],
        test_images=dataset.test_images[:1],
        test_labels=dataset.test_labels[:1],
    )
    features = encoder_features(model.encoder, watched, model.config.pixels)
    return held_out_knn_top1(features.train, features.train_labels)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name!r} is unknown: give cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} needs a GPU and there is none: give --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name} is not there: the GPUs are cuda:0..{torch.cuda.device_count() - 1}")
    return device


def _peak_memory_bytes(device: torch.device) -> int:
    """Of the GPU where there is one, else of this process."""
    if device.type == "cuda":
        return peak_gpu_bytes(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
