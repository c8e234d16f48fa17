"""The training loop of baselines: the trainer's, with a method's loss in place of the rows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.baselines.checkpoints import Checkpoints
from experiments.baselines.methods import METHODS, Method, Task
from trainer.build import model_of, views_of_steps
from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.evaluate.knn_probe import KnnProbe
from trainer.loop import seed_generators
from trainer.model import PICModel, save_encoder
from trainer.observing import is_due, lacks_beginning
from trainer.run.claim import DirectoryClaim
from trainer.run.directory import ENCODER_FILE, METRICS_FILE, SUMMARY_FILE, read_summary
from trainer.run.recorder import Recorder
from trainer.run.resume import resolve_resume
from trainer.run_dataset import dataset_of, with_pixel_scale
from trainer.schedule import forward_seed, learning_rates
from trainer.stopping import Interrupted, stop_signals
from weightserver.common.atomic_files import atomic_write, directory_lock
from weightserver.common.interrupts import interruption
from weightserver.core.arrays import Float32Array
from weightserver.torch import Ranks, RowCounters, WindowSampler, to_device


@dataclass(frozen=True)
class Training:
    """What a baseline trains with."""

    config: TrainConfig
    """Settings of the run; --views is the number of views that the method has."""
    ranks: Ranks
    """The single one, with its device."""
    method: Method
    optimizer: torch.optim.Optimizer
    rates: Float32Array
    """The learning rate of each update."""
    steps: range
    sampler: WindowSampler
    views: Iterator[Tensor]
    """V views for each step, (B, C, side, side) each."""
    recorder: Recorder
    knn: KnnProbe | None
    knn_steps: float
    """Updates between kNN evaluations."""
    checkpoints: Checkpoints
    signals: list[int]


def train_baseline(method: str, config: TrainConfig) -> dict[str, float]:
    """Trains one of `METHODS` in the directory of `config`, and returns its summary.json.

    The run sees as many views as a run of PIC with these settings, --epochs times N times --views, in batches of
    --batch-size images: one that takes two views of an image has half as many updates as one that takes a single view.
    Images are visited in epochs. Learning rates and the kNN evaluations of --knn-every follow the share of the views
    seen; the settings of rows, window and negatives have no effect.

    With --resume auto, a run that was killed is resumed from its newest checkpoint, to the same weights; one that has
    ended returns its summary.

    Raises:
        ValueError: settings that the images or the method cannot have, or the directory belongs to another run.
        OSError: another process is writing the directory.
        Interrupted: a signal ended the run, after a checkpoint.
    """
    started, output = time.perf_counter(), config.run.output
    with directory_lock(output):
        ranks, dataset = Ranks(device=config.compute.torch_device()), dataset_of(config)
        config = with_pixel_scale(resolve_resume(config, ranks), dataset, ranks)
        with DirectoryClaim(config, len(dataset.train_images), is_first=True) as claim:
            if summary := read_summary(output):
                return summary
            model, summary = _train(method, config, dataset, claim)
            save_encoder(model.encoder, config.model.encoder, output / ENCODER_FILE)
            summary["train_seconds"] = time.perf_counter() - started
            text = json.dumps(summary, indent=2) + "\n"
            atomic_write(output / SUMMARY_FILE, lambda path: path.write_text(text))
    return summary


def _train(
    name: str, config: TrainConfig, dataset: Dataset, claim: DirectoryClaim
) -> tuple[PICModel, dict[str, float]]:
    """Trains a method, from its newest checkpoint if there is one; returns its model and a summary."""
    with ExitStack() as stack:
        training = _build(name, config, dataset, claim, stack)
        if training.knn is not None and lacks_beginning(training.steps, config.report.log_every):
            with training.recorder.paused("kNN evaluation"):
                training.knn.observe_beginning()
        for step in training.steps:
            loss = _update(training, step)
            last = step + 1 == training.steps.stop
            _observe(training, step, loss, last=last)
            _save_if_due(training, step, last=last)
    num_views = training.steps.stop * config.optimization.batch_size * training.method.num_views
    return training.method.model, {
        "steps": training.steps.stop,
        "epochs": training.steps.stop * config.optimization.batch_size / len(dataset.train_images),
        "views": num_views,
        "loss": json.loads((config.run.output / METRICS_FILE).read_text().splitlines()[-1])["loss"],
    }


def _build(name: str, config: TrainConfig, dataset: Dataset, claim: DirectoryClaim, stack: ExitStack) -> Training:
    config.compute.configure_torch()
    ranks = Ranks(device=config.compute.torch_device())
    model, num_images = model_of(config, ranks), len(dataset.train_images)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.sampling.seed)  # the encoder starts as PIC's; this is for what the method adds
        task = Task(dataset, batch_size=config.optimization.batch_size, dim=config.model.dim)
        method = METHODS[name](model, task)
    optimizer = config.optimization.optimizer_of(method, ranks.device)
    num_steps, rates = schedule(config, num_images, method.num_views)
    checkpoints = Checkpoints(config.run.output / "checkpoints")
    start_step = checkpoints.restore(method, optimizer) if config.run.resume else 0
    claim.prepare(start_step, num_steps)
    shown = config.with_settings(num_negatives=method.num_choices, steps=num_steps)
    recorder = Recorder(shown, num_images, ranks, stack)
    recorder.follow(RowCounters(), start_step)
    steps = range(start_step, num_steps)
    sampler = WindowSampler(
        dataset.order(config.sampling.order_seed), batch_size=config.optimization.batch_size, seed=config.sampling.seed
    )
    own_views = config.with_settings(views=method.num_views)
    return Training(
        config=own_views,
        ranks=ranks,
        method=method,
        optimizer=optimizer,
        rates=rates,
        steps=steps,
        sampler=sampler,
        views=views_of_steps(own_views, dataset, sampler, ranks, steps, stack),
        recorder=recorder,
        knn=KnnProbe(model, dataset.evaluated, ranks, seed=config.sampling.seed) if config.report.knn_every else None,
        knn_steps=config.report.knn_every
        * num_images
        * config.views.views
        / (config.optimization.batch_size * method.num_views),
        checkpoints=checkpoints,
        signals=stack.enter_context(stop_signals()),
    )


def schedule(config: TrainConfig, num_images: int, num_views: int) -> tuple[int, Float32Array]:
    """Number of updates with `num_views` views of an image each, and their learning rates, float32 [num_steps].

    They see as many views as PIC's updates with these settings, and have the same warm-up, as a share of all.
    """
    pic_steps = config.optimization.num_steps(num_images)
    num_steps = max(1, round(pic_steps * config.views.views / num_views))
    warmup_steps = round(config.optimization.warmup_steps(num_images, pic_steps) * num_steps / pic_steps)
    rates = learning_rates(
        num_steps=max(num_steps, warmup_steps), base=config.optimization.learning_rate, warmup_steps=warmup_steps
    )
    return num_steps, rates[:num_steps]


def _update(training: Training, step: int) -> Tensor:
    """One update by the method's loss, which it returns, a scalar."""
    stage, device = training.recorder.stage, training.ranks.device
    seed_generators(forward_seed(training.config.sampling.seed, step, 0), device)
    with stage("data"):
        views = [
            next(training.views).contiguous(memory_format=torch.channels_last) for _ in range(training.method.num_views)
        ]
        images = to_device(torch.from_numpy(training.sampler.images(step, 0)), device)
    training.optimizer.zero_grad()
    with stage("forward"):
        loss: Tensor = training.method(views, images)
    with stage("backward"):
        loss.backward()
    with stage("optimizer"):
        training.optimizer.param_groups[0]["lr"] = float(training.rates[step])
        training.optimizer.step()
        training.method.finish_update()
    return loss.detach()


def _observe(training: Training, step: int, loss_of_step: Tensor, *, last: bool) -> None:
    """Records the steps since the last record if one is due."""
    every, recorder = training.config.report.log_every, training.recorder
    recorder.advance(step)
    if not last and (step + 1) % every:
        return
    if not math.isfinite(loss := loss_of_step.item()):
        raise ValueError(f"the loss is {loss} at step {step}: try a lower --learning-rate")
    record = recorder.measure(step, loss, float(training.rates[step]), 0, {})
    if training.knn is not None:
        with recorder.paused("kNN evaluation"):
            due = is_due(training.knn_steps, step, every, last)
            record |= training.knn.observe(due=due)
    recorder.write(record)


def _save_if_due(training: Training, step: int, *, last: bool) -> None:
    """Saves a checkpoint if one is due, and after the last step; after a signal, saves one and ends the run."""
    every = training.config.run.checkpoint_every
    if last or training.signals or (every and (step + 1) % every == 0):
        training.checkpoints.save(step + 1, training.method, training.optimizer)
    if training.signals and not last:
        message = interruption(f"after {step + 1} steps", "repeat the command to resume")
        raise Interrupted(training.signals[0], message)
