"""The training loop."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from trainer.config import TrainConfig
from trainer.data import Dataset, load_dataset
from trainer.data.augment import Augmentation
from trainer.evaluate import ProbeResult, encoder_features, evaluate_features
from trainer.evaluate.knn import held_out_knn_top1
from trainer.loss import cosine_softmax_loss
from trainer.model import PICModel, build_model, save_encoder
from trainer.progress import TrainingProgress
from trainer.recency import RecentRows
from trainer.rows import DenseRows, RemoteRows, RowStore
from trainer.schedule import Float32Array, RowOrder, VisitSchedule, learning_rates, visit_uniforms
from weightserver import LocalCluster, NoTableError, TableSpec, WeightClient

_NUM_WATCHED = 10_000
"""Training images that the kNN evaluations during training use."""


@dataclass(frozen=True)
class TrainResult:
    """What a run ended with; the same as its summary.json and encoder.safetensors."""

    dataset: Dataset
    model: PICModel
    summary: dict[str, Any]
    results: dict[str, ProbeResult]
    """Protocol to result; empty without --evaluate."""


def train(config: TrainConfig) -> TrainResult:
    """Trains and evaluates as `config` says, and fills the run's directory.

    Raises:
        ValueError: settings that do not fit the data, a directory or a table that another run used.
        WeightServerError: the weight servers failed for longer than the client tries.
    """
    config.check()
    started = time.perf_counter()
    device = _device(config.device)
    torch.manual_seed(config.seed)
    dataset = load_dataset(config.dataset, config.data_dir)
    images = dataset.train_images.to(device)  # uint8 (N, C, H, W)
    num_images, batch_size = len(images), config.batch_size
    num_steps = config.num_steps(num_images)
    spec = _table_spec(config, num_images)

    # Everything random is a function of seeds and the visit index: the step number is all the state there is.
    order = RowOrder(num_images, config.order_seed)
    schedule = VisitSchedule(
        num_rows=num_images,
        window_size=config.window_size,
        window_stride=config.window_stride,
        seed=config.seed,
    )
    recent = RecentRows(schedule, num_active=config.num_negatives, batch_size=batch_size)
    rates = learning_rates(
        num_steps=num_steps,
        base=config.learning_rate,
        warmup_steps=round(config.warmup_fraction * num_steps),
    )
    augment = Augmentation(config.augmentation, config.encoder.image_size)
    model = build_model(config.encoder, config.dim, seed=config.seed)
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), momentum=config.momentum, weight_decay=config.weight_decay)

    with ExitStack() as stack:
        stack.enter_context(_claimed_output(config))
        rows = stack.enter_context(_open_rows(config, spec, rates))
        metrics = stack.enter_context((config.output / "metrics.jsonl").open("w"))
        board = stack.enter_context(SummaryWriter(str(config.output / "tensorboard")))
        progress = stack.enter_context(TrainingProgress(num_steps, chance=math.log(config.num_negatives)))
        interval = _Interval(rows)
        for step in range(num_steps):
            active = recent.active(step)  # rows (K,), labels (B,)
            rows.prefetch(active.rows, step=step)

            preparing = time.perf_counter()
            visits = np.arange(step * batch_size, (step + 1) * batch_size)
            visited = torch.from_numpy(order.images(active.rows[active.labels])).to(device)  # (B,)
            uniforms = torch.from_numpy(visit_uniforms(config.seed, visits, augment.num_uniforms)).to(device)
            views = augment(images[visited], uniforms).contiguous(memory_format=torch.channels_last)  # (B, C, H, W)
            interval.data_wait_seconds += time.perf_counter() - preparing

            features = model(views)  # (B, D)
            weight = rows.weights(active.rows, step=step).to(device).requires_grad_()  # (K, D)
            labels = torch.from_numpy(active.labels).to(device)  # (B,)
            loss = cosine_softmax_loss(features, weight, labels, temperature=config.temperature)

            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            rows.apply_gradients(active.rows, weight.grad, step=step)
            optimizer.param_groups[0]["lr"] = float(rates[step])
            optimizer.step()

            last = step + 1 == num_steps
            if last or (step + 1) % config.log_every == 0:
                record = interval.end(step, loss.item(), float(rates[step]), batch_size)
                if _is_due(config.knn_every * num_images / batch_size, step, config.log_every, last):
                    record["knn_top1"] = _watch(model, dataset)
                if not math.isfinite(record["loss"]):
                    raise ValueError(f"the loss is {record['loss']} at step {step}: try a lower --learning-rate")
                metrics.write(json.dumps(record) + "\n")
                metrics.flush()
                for name in record.keys() - {"step"}:
                    board.add_scalar(name, record[name], step)
                progress.update(record)
        rows.close()  # every update is durable

    save_encoder(model.encoder, config.encoder, config.output / "encoder.safetensors")
    trained = time.perf_counter()
    results = evaluate_features(encoder_features(model.encoder, dataset)) if config.evaluate else {}
    summary = {
        "steps": num_steps,
        "epochs": num_steps * batch_size / num_images,
        "loss": record["loss"],
        **{f"{protocol}_top1": result.top1 for protocol, result in results.items()},
        "train_seconds": trained - started,
        "seconds": time.perf_counter() - started,
        "peak_memory_bytes": _peak_memory_bytes(device),
    }
    (config.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return TrainResult(dataset, model, summary, results)


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


@contextmanager
def _open_rows(config: TrainConfig, spec: TableSpec, rates: Float32Array) -> Iterator[RowStore]:
    """The row store that `config` asks for, with a table, its schedule and a session where it needs them."""
    if config.rows == "dense":
        yield DenseRows(spec, rates)
        return
    with ExitStack() as stack:
        addresses = config.server_addresses
        if not addresses:
            addresses = stack.enter_context(LocalCluster(config.num_shards, config.output / "servers")).addresses
        client = stack.enter_context(WeightClient(addresses, insecure=config.insecure))
        _refuse_used_table(client)
        client.create_table(spec)
        client.extend_schedule(0, rates)
        client.open_session(config.output.name)
        rows = RemoteRows(client)
        stack.callback(rows.close)
        yield rows


def _refuse_used_table(client: WeightClient) -> None:
    try:
        info = client.describe()
    except NoTableError:
        return
    if info.clock > 0 or info.rows_stored > 0:
        raise ValueError(
            f"the weight servers hold the rows of run {info.run!r} up to step {info.clock}: "
            "use other servers, or delete those rows with 'weightserver drop'"
        )


@contextmanager
def _claimed_output(config: TrainConfig) -> Iterator[None]:
    """Makes the run's directory and writes config.json; refuses a directory that another run used.

    A run that fails before its first step lets go of the directory, so that it can be tried again.
    """
    claim = config.output / "config.json"
    try:
        config.output.mkdir(parents=True, exist_ok=True)
        with claim.open("x") as file:
            file.write(config.to_json())
    except OSError as error:
        if isinstance(error, FileExistsError) and claim.exists():
            raise ValueError(f"{config.output} holds another run: choose another --output, or delete it") from None
        raise ValueError(
            f"--output {config.output} cannot be used ({error.strerror}): choose another directory"
        ) from None
    try:
        yield
    except BaseException:
        if not (config.output / "metrics.jsonl").exists():
            claim.unlink(missing_ok=True)
        raise


class _Interval:
    """What is measured between two lines of metrics.jsonl."""

    def __init__(self, rows: RowStore) -> None:
        self._rows = rows
        self._next_step = 0
        self._begin()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self.data_wait_seconds = 0.0
        counters = self._rows.counters
        self._before = (counters.wait_seconds, counters.fetched_bytes, counters.pushed_bytes)

    def end(self, step: int, loss: float, learning_rate: float, batch_size: int) -> dict[str, Any]:
        """The record of the steps since the last one, and the begin of the next."""
        seconds = time.perf_counter() - self._started
        num_steps = step + 1 - self._next_step
        counters = self._rows.counters
        wait_seconds, fetched_bytes, pushed_bytes = self._before
        record = {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "images_per_second": num_steps * batch_size / seconds,
            "seconds": seconds,
            "data_wait_seconds": self.data_wait_seconds,
            "row_wait_seconds": counters.wait_seconds - wait_seconds,
            "fetched_bytes": counters.fetched_bytes - fetched_bytes,
            "pushed_bytes": counters.pushed_bytes - pushed_bytes,
        }
        self._next_step = step + 1
        self._begin()
        return record


def _is_due(every_steps: float, step: int, log_every: int, last: bool) -> bool:
    """Whether a multiple of `every_steps` lies between this logged step and the one before."""
    if every_steps <= 0:
        return False
    return last or (step + 1) // every_steps > max(0, step + 1 - log_every) // every_steps


def _watch(model: PICModel, dataset: Dataset) -> float:
    """kNN top-1 of held-out training images, in percent."""
    part = slice(0, _NUM_WATCHED)
    watched = Dataset(
        train_images=dataset.train_images[part],
        train_labels=dataset.train_labels[part],
        test_images=dataset.test_images[:1],
        test_labels=dataset.test_labels[:1],
    )
    features = encoder_features(model.encoder, watched)
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
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
