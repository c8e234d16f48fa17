"""The training loop: Algorithm 1 of the paper, for several ranks, views and parts of a batch.

Algorithm 1                                           here
for x, y in sliding_window_data_scheduler:            run.views, run.announcements
    W1 = correct(sample(W))                           run.announcements, run.head.active_rows
    feat = f.forward(aug(x))                          run.encoder, of views that were augmented ahead
    loss = CrossEntropyLoss(cos_sim(feat, W1)/t, y)   run.head
    loss.backward()
    update(f.params), update(W1.params)               run.optimizer.step, run.head.step
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from trainer.build import Run, build_run
from trainer.config import TrainConfig
from trainer.data import Dataset, load_dataset
from trainer.data.cutmix import NUM_UNIFORMS, CutMix
from trainer.display import shown, stage
from trainer.distributed import averaging_gradients, process_group
from trainer.model import PICModel
from trainer.monitors import Update
from trainer.results import TrainResult, write_results
from trainer.run.opening import images_of_run
from trainer.run.resume import resolve_resume, with_pixel_scale
from trainer.run.totals import Totals
from trainer.schedule import batch_uniforms, forward_seed
from trainer.stopping import Interrupted
from weightserver.common.interrupts import interruption
from weightserver.torch import Announced, Ranks

_SIGNAL_STEPS = 4
"""Steps between exchanges of received signals if there are several ranks; a single rank looks at every step."""


def train(config: TrainConfig, *, on_step: Callable[[int], None] = lambda step: None) -> TrainResult:
    """Trains and evaluates on the ranks that torchrun started; rank 0 writes the run's directory.

    `on_step` is called with the number of each step before it starts, on every rank: for benchmarks and tests.

    Raises:
        ValueError: settings that do not match the data, a directory or a table that another run used.
        WeightServerError: the weight servers failed for longer than the client retries.
        Interrupted: a signal ended the run, after a checkpoint.
    """
    config.check()
    started = time.perf_counter()
    device = config.compute.torch_device()
    with shown(wanted=config.report.log_format == "text"):
        with stage("loading the images"):
            dataset = dataset_of(config)
        _check_images(config, dataset)
        timeout_seconds = config.compute.rank_timeout_seconds + max(
            config.servers.retry_seconds, config.servers.wait_for_servers
        )
        with process_group(device, timeout_seconds=timeout_seconds, agreed=(Interrupted,)) as ranks:
            config = resolve_resume(config, ranks)
            dataset = images_of_run(config, dataset, ranks)
            config = with_pixel_scale(config, dataset, ranks)
            model, totals = _train_rank(config, dataset, ranks, on_step, started)
        if not ranks.is_first:
            return TrainResult(config, dataset, model, is_first=False)
        return write_results(config, dataset, model, totals)


def dataset_of(config: TrainConfig) -> Dataset:
    """Loads the images that a run's settings name. Raises ValueError as `load_dataset` does."""
    return load_dataset(
        config.data.dataset,
        config.data.data_dir,
        num_images=config.data.num_images,
        image_size=config.model.encoder.image_size,
        seed=config.sampling.seed,
        decode_threads=config.data.decode_threads,
        background=config.data.background,
        options=config.data,
    )


def _check_images(config: TrainConfig, dataset: Dataset) -> None:
    """Raises ValueError for images that the encoder cannot take, or that lack the labels to evaluate with."""
    channels = dataset.test_images.shape[1]
    if channels != config.model.encoder.in_channels:
        raise ValueError(
            f"the encoder takes {config.model.encoder.in_channels}-channel images, those of {config.data.dataset!r} "
            f"have {channels}: give --encoder.in-channels {channels}"
        )
    if config.report.evaluate:
        dataset.check_evaluated(trained_on_labels=config.sampling.labels is not None)
    elif config.report.knn_every or config.report.online_probe:
        dataset.check_labelled()


def _train_rank(
    config: TrainConfig, dataset: Dataset, ranks: Ranks, on_step: Callable[[int], None], started: float
) -> tuple[PICModel, Totals]:
    """One rank's part of the training: a slice of every batch, and a share of the rows."""
    with ExitStack() as stack:
        run = build_run(config, dataset, ranks, stack, started)
        if run.knn is not None and run.steps.start == 0:
            with run.recorder.paused("kNN evaluation"):
                run.knn.observe_beginning()
        for step in run.steps:
            with run.recorder.stage("rows"):
                classes = next(run.announcements)  # ids (A, b) of the batch; rows (K,): the most recently visited
            on_step(step)
            update = _update(run, step, classes)
            last = step + 1 == run.steps.stop
            _observe(run, step, update, len(classes.rows), last=last)
            _save_if_due(run, step, last=last)
        with stage("writing the rows"):
            run.head.flush()  # every update is durable
        if run.steps:
            run.checkpoints.save(run.steps.stop, run.model, run.optimizer)
        (signalled,) = ranks.max_over_ranks([max(run.signals, default=0)])
        if signalled:
            raise Interrupted(int(signalled), interruption("after the last step", "--resume ends the run"))
        totals = run.usage.now()
        ranks.barrier()  # before it no rank stops the servers
    return run.model, totals


def _update(run: Run, step: int, classes: Announced) -> Update:
    """One SGD update of the encoder and the active rows; returns the batch's loss and what else is observed of it.

    On one rank b is B / A, the images in one part of the batch; several ranks share these images and the K rows.
    """
    stage, device = run.recorder.stage, run.ranks.device
    seed_generators(forward_seed(run.config.sampling.seed, step, run.ranks.rank), device)
    run.optimizer.zero_grad()
    ids = classes.ids[:, run.ranks.share(run.config.optimization.part_size)]  # (A, b)
    temperature = run.config.loss.temperature_of(step, run.steps.stop)
    embedded: list[Tensor] = []
    loss = torch.zeros((), device=device)
    for number, (part, view) in enumerate(run.parts, start=step * len(run.parts)):
        with stage("data"):
            images = next(run.views).contiguous(memory_format=run.config.compute.memory_format)  # (b, C, side, side)
            mix = CutMix.drawn(
                run.config.views.cutmix, batch_uniforms(run.config.sampling.seed, number, NUM_UNIFORMS), images
            )
            images = images if mix is None else mix.views(images)
        with averaging_gradients(run.encoder, (part, view) == run.parts[-1]):
            with stage("forward"):
                embeddings = run.encoder(images)  # (b, D)
            with stage("rows"):  # after the encoder's work was queued: the rows may still be in flight
                run.head.active_rows()  # (K, D), corrected
            with stage("forward"):  # Equation (1): cross entropy of softmax(cos(weight, embedding) / τ), (b, K) logits
                updates = view < run.config.views.views  # small crops update no rows
                loss_of = partial(run.head, ids=ids[part], view=view, update_rows=updates, temperature=temperature)
                part_loss = loss_of(embeddings) if mix is None else mix.loss(loss_of, embeddings)
                part_loss /= len(run.parts)
            with stage("backward"):
                part_loss.backward()
        loss += part_loss.detach()
        embedded.append(embeddings.detach())

    weight, labels = run.head.active_rows().detach(), run.head.labels  # (K, D); (B,), own class among the K
    run.optimizer.param_groups[0]["lr"] = rate = float(run.rates[step])
    with stage("rows"):
        run.head.step(rate)  # by the gradient (K, D) of the active rows
    with stage("optimizer"):
        run.optimizer.step()
    first_views = embedded[:: len(run.parts) // run.config.optimization.accumulate]
    return Update(loss, torch.stack(first_views), weight, labels)


def _observe(run: Run, step: int, update: Update, num_active: int, *, last: bool) -> None:
    """Records the steps since the last record if one is due."""
    config, every = run.config, run.config.report.log_every
    run.recorder.advance(step)
    run.monitors.keep(update.embeddings)
    if run.probe is not None:
        run.probe.learn(step)
    if not last and (step + 1) % every:
        return
    if not math.isfinite(loss := update.loss.item()):
        raise ValueError(f"the loss is {loss} at step {step}: try a lower --learning-rate")
    monitored = run.monitors.measure(update, num_active)
    if (temperature := config.loss.temperature_of(step, run.steps.stop)) is not None:
        monitored["temperature"] = temperature
    if run.probe is not None:
        monitored["online_top1"] = run.probe.take_top1()
    record = run.recorder.measure(step, loss, float(run.rates[step]), num_active, monitored)
    if run.knn is not None:
        knn_steps = config.report.knn_every * len(run.dataset.train_images) / config.optimization.batch_size
        with run.recorder.paused("kNN evaluation"):
            record |= run.knn.observe(record["seconds"], due=is_due(knn_steps, step, every, last), last=last)
    run.recorder.write(record)


def _save_if_due(run: Run, step: int, *, last: bool) -> None:
    """Saves a checkpoint if one is due. If a rank received a signal, saves one and ends the run."""
    if last:
        return
    if run.ranks.world_size == 1 or (step + 1) % _SIGNAL_STEPS == 0:
        (signalled,) = run.ranks.max_over_ranks([max(run.signals, default=0)])  # ranks receive it at different steps
        if signalled:
            run.checkpoints.save(step + 1, run.model, run.optimizer)
            hint = "--resume continues from there" if run.leaves_checkpoints else "dense rows leave no checkpoint"
            raise Interrupted(int(signalled), interruption(f"after {step + 1} steps", hint))
    if run.config.run.checkpoint_every and (step + 1) % run.config.run.checkpoint_every == 0:
        run.checkpoints.save(step + 1, run.model, run.optimizer)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the generators that the encoder may draw from, of the CPU and of `device`; torch.manual_seed seeds all."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def is_due(every_steps: float, step: int, log_every: int, last: bool) -> bool:
    """Whether a multiple of `every_steps` lies between this logged step and the previous one."""
    return last or (step + 1) // every_steps > max(0, step + 1 - log_every) // every_steps
