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

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from trainer.build import Run, build_run
from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.display import shown, stage
from trainer.distributed import averaging_gradients, process_group
from trainer.model import PICModel
from trainer.monitors import Update
from trainer.results import TrainResult, write_results
from trainer.run.resume import resolve_resume
from trainer.run.totals import Totals
from trainer.run_dataset import (
    check_same_images,
    check_sample,
    dataset_of,
    images_of_run,
    with_pixel_scale,
    write_reading,
)
from trainer.schedule import forward_seed
from trainer.settings import named_by_flags
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
    with shown(wanted=config.report.log_format == "text"), named_by_flags():
        timeout_seconds = config.compute.rank_timeout_seconds + max(
            config.servers.retry_seconds, config.servers.wait_for_servers
        )
        with process_group(device, timeout_seconds=timeout_seconds, agreed=(Interrupted,)) as ranks:
            config = resolve_resume(config, ranks)
            with stage("loading the images"):
                dataset = dataset_of(config)
            dataset = images_of_run(config, dataset, ranks)
            check_same_images(dataset, ranks)
            check_sample(config, dataset, ranks)
            config = with_pixel_scale(config, dataset, ranks)
            model, totals = _train_rank(config, dataset, ranks, on_step, started)
        if not ranks.is_first:
            return TrainResult(config, dataset, model, is_first=False)
        return write_results(config, dataset, model, totals)


def _train_rank(
    config: TrainConfig, dataset: Dataset, ranks: Ranks, on_step: Callable[[int], None], started: float
) -> tuple[PICModel, Totals]:
    """One rank's part of the training: a slice of every batch, and a share of the rows."""
    with ExitStack() as stack:
        run = build_run(config, dataset, ranks, stack, started)
        if ranks.is_first:
            write_reading(config, dataset)
        run.observer.begin()
        for step in run.steps:
            with run.stage("rows"):
                classes = next(run.announcements)  # ids (A, b) of the batch; rows (K,): the most recently visited
            on_step(step)
            update = _update(run, step, classes)
            run.observer.observe(step, update, float(run.rates[step]), len(classes.rows))
            if step + 1 < run.steps.stop:
                _save_if_due(run, step + 1)
        with stage("writing the rows"):
            run.head.flush()  # every update is durable
        if run.steps:
            run.checkpoints.save(run.steps.stop, run.model, run.optimizer)
        (signalled,) = ranks.max_over_ranks([max(run.signals, default=0)])
        if signalled and run.head.client is not None:  # dense rows leave no checkpoint: their encoder is written now
            raise Interrupted(int(signalled), interruption("after the last step", "--resume ends the run"))
        totals = run.usage.now()
        ranks.barrier()  # before it no rank stops the servers
    return run.model, totals


def _update(run: Run, step: int, classes: Announced) -> Update:
    """One update of the encoder and the active rows; returns the batch's loss and what else is observed of it.

    On one rank b is B / A, the images in one part of the batch; several ranks share these images and the K rows.
    """
    stage, device = run.stage, run.ranks.device
    seed_generators(forward_seed(run.config.sampling.seed, step, run.ranks.rank), device)
    run.optimizer.zero_grad()
    ids = classes.ids[:, run.ranks.share(run.config.optimization.part_size)]  # (A, b)
    embedded: list[Tensor] = []
    loss = torch.zeros((), device=device)
    for part, view in run.parts:
        with stage("data"):
            images = next(run.views).contiguous(memory_format=torch.channels_last)  # (b, C, side, side)
        with averaging_gradients(run.encoder, (part, view) == run.parts[-1]):
            with stage("forward"):
                embeddings = run.encoder(images)  # (b, D)
            with stage("rows"):  # after the encoder's work was queued: the rows may still be in flight
                run.head.active_rows()  # (K, D), corrected
            with stage("forward"):  # Equation (1): cross entropy of softmax(cos(weight, embedding) / τ), (b, K) logits
                part_loss = run.head(embeddings, ids[part], view=view) / len(run.parts)
            with stage("backward"):
                part_loss.backward()
        loss += part_loss.detach()
        embedded.append(embeddings.detach())

    weight, labels = run.head.active_rows().detach(), run.head.labels  # (K, D); (B,), own class among the K
    rate = float(run.rates[step])
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    with stage("rows"):
        run.head.step(rate)  # by the gradient (K, D) of the active rows
    run.observer.before_update(step)
    with stage("optimizer"):
        run.optimizer.step()
    first_views = embedded[:: len(run.parts) // run.config.optimization.accumulate]
    return Update(loss, torch.stack(first_views), weight, labels)


def _save_if_due(run: Run, finished: int) -> None:
    """Saves a checkpoint after `finished` steps if one is due. If a rank received a signal, saves one and ends it."""
    signalled = 0.0
    if run.ranks.world_size == 1 or finished % _SIGNAL_STEPS == 0:
        (signalled,) = run.ranks.max_over_ranks([max(run.signals, default=0)])  # ranks receive it at different steps
    every = run.config.run.checkpoint_every
    if signalled or (every and finished % every == 0):
        run.checkpoints.save(finished, run.model, run.optimizer)
    if signalled:
        hint = "--resume continues from there" if run.head.client is not None else "dense rows leave no checkpoint"
        raise Interrupted(int(signalled), interruption(f"after {finished} steps", hint))


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the generators that the encoder may draw from, of the CPU and of `device`; torch.manual_seed seeds all."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
