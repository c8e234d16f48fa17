"""Prometheus metrics of a trainer process, in a separate registry.

What a step does, and what it waits for, is read at each scrape, so that a step which does not end shows; the loss and
the monitors are those of the newest record of metrics.jsonl.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from weightserver import WeightClient
from weightserver.common.metrics_http import serve_metrics
from weightserver.common.stages import StageClock
from weightserver.torch import RowCounters

# From 1 ms, of a step without an encoder; steps to 60 s, fetches for as long as they are retried.
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
)

_GAUGES = {
    "loss": "Loss of the last logged step, in nats; chance is the logarithm of the number of active rows.",
    "learning_rate": "Learning rate of the last logged step.",
    "images_per_second": "Images trained on per second between the last two logged steps, or since then if longer.",
    "active_rows": "Rows that are the classes of a step.",
    "instance_top1": "Percent of a batch's images whose own class has the highest logit of all active rows.",
    "rankme": "RankMe of the newest embeddings: their effective number of dimensions.",
    "feature_std": "Standard deviation of a dimension of L2-normalised embeddings; 0 if all are the same.",
    "mean_cosine": "Mean cosine of two images' embeddings; 1 if all are the same.",
    "gradient_norm": "L2 norm of the encoder's gradient.",
    "row_norm": "Mean L2 norm of the active rows.",
    "online_top1": "Top-1 of the online linear probe in percent, since the last logged step; NaN without one.",
}
"""Key of a record, which is the name after pic_trainer_, to help text; NaN until a record has it."""

_HELD = {
    "resident_rows": "Rows that this process holds.",
    "prefetch_pending_rows": "Rows requested from the weight servers that have not arrived yet.",
    "write_back_pending_rows": "Rows waiting to be written back to the weight servers.",
}
"""Attribute of the row store's counters, which is the name after pic_trainer_, to help text."""

_COUNTERS = {
    "fetched_bytes": ("row_fetched_bytes", "Bytes of rows fetched from the weight servers."),
    "fetched_rows": ("row_fetched_rows", "Rows fetched from the weight servers."),
    "pushed_bytes": ("row_pushed_bytes", "Bytes of gradients pushed, or rows written back, to the weight servers."),
    "pushed_rows": ("row_pushed_rows", "Rows whose gradients were pushed, or that were written back."),
}
"""Attribute of the row store's counters to the name after pic_trainer_ and help text."""

STAGES = ("data", "rows", "forward", "backward", "optimizer", "other")
"""Stages of a step; a record has the seconds of each as NAME_seconds."""
PAUSE = "pause"
"""A stage whose time belongs to no step."""


def peak_gpu_bytes(device: torch.device) -> int:
    """Peak memory of this process's tensors on `device`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


class TrainerMetrics:
    """Metrics of one trainer process since it started; safe to scrape from any thread."""

    def __init__(
        self,
        *,
        run: str,
        rank: int,
        window_size: int,
        batch_size: int,
        num_steps: int,
        device: torch.device,
        retry_seconds: float = 300.0,
    ) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._batch_size = batch_size
        self._num_steps_before = 0
        """Steps before the current interval."""
        self._num_steps = 0
        self._counters: RowCounters | None = None
        self._clock = StageClock("other")
        self._seen: dict[str, float] = {}
        """What has been added to the counters of what `follow` was given."""
        self._seen_stages: dict[str, float] = {}
        self._last = self._last_interval = math.nan, math.inf
        """Images a second and seconds of the newest record, and of the interval before the current one."""
        self.registry.register(_Live(self._read))  # first, so that the others show what it reads
        self.registry.register(WeightClient.metrics())
        info = Info("pic_trainer_run", "Run and rank of this process.", registry=self.registry)
        info.info({"run": run, "rank": str(rank)})
        self._gauge("window_size_rows", "W, rows of the sliding window.").set(window_size)
        self._gauge("batch_size", "B, images in each update, on all ranks together.").set(batch_size)
        self._gauge("run_steps", "Steps of the whole run.").set(num_steps)
        self._steps = Counter("pic_trainer_steps", "Finished steps.", registry=self.registry)
        self._images = Counter("pic_trainer_images", "Images trained on.", registry=self.registry)
        self._step_seconds = self._histogram(
            "step_seconds", "Duration of a step: the mean of the steps between two logged ones, counted for each."
        )
        self._stage_seconds = Counter(
            "pic_trainer_stage_seconds",
            "Time of each stage of the steps; a GPU's time appears where its results are awaited.",
            ["stage"],
            registry=self.registry,
        )
        self._fetch_seconds = self._histogram(
            "fetch_seconds",
            "Time from requesting rows from the weight servers to their arrival, including retries.",
            longest=retry_seconds,
        )
        self._checkpoint_time = self._gauge(
            "last_checkpoint_timestamp_seconds",
            "Time of the last complete checkpoint, or of this process's start, in seconds since 1970.",
        )
        self._checkpoint_time.set_to_current_time()
        memory = self._gauge("gpu_memory_bytes", "Peak memory of this process's tensors on its GPU.")
        memory.set_function(lambda: peak_gpu_bytes(device))
        ProcessCollector(registry=self.registry)
        self._gauges = {key: self._gauge(key, text) for key, text in _GAUGES.items()}
        for gauge in self._gauges.values():
            gauge.set(math.nan)
        self._gauges.pop("images_per_second").set_function(self._images_per_second)
        for key, text in _HELD.items():
            self._gauge(key, text).set_function(partial(self._held, key))
        self._row_wait = Counter(
            "pic_trainer_row_wait_seconds", "Time that training waited for rows.", registry=self.registry
        )
        self._moved = {
            key: Counter(f"pic_trainer_{name}", text, registry=self.registry) for key, (name, text) in _COUNTERS.items()
        }

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pic_trainer_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, *, longest: float = 60.0) -> Histogram:
        bounds = [*(bound for bound in _SECONDS if bound < longest), max(longest, _SECONDS[0])]
        return Histogram(f"pic_trainer_{name}", text, buckets=bounds, registry=self.registry)

    def checkpoint_saved(self) -> None:
        self._checkpoint_time.set_to_current_time()

    def follow(self, counters: RowCounters, clock: StageClock) -> None:
        """Shows what the row store counts and what the clock measures from now on: called once in each interval."""
        with self._lock:
            self._read_stages()
            if counters is not self._counters:
                self._counters, self._seen = counters, {}
            self._clock, self._seen_stages = clock, {}
            self._last_interval, self._num_steps_before = self._last, self._num_steps

    def step_finished(self) -> None:
        self._num_steps += 1
        self._steps.inc()
        self._images.inc(self._batch_size)

    def observe(self, record: dict[str, Any]) -> None:
        """Shows a record of metrics.jsonl; keys without a metric are ignored."""
        num_steps = record["num_steps"]
        for _ in range(num_steps):
            self._step_seconds.observe(record["seconds"] / num_steps)
        for key in self._gauges.keys() & record.keys():
            self._gauges[key].set(record[key])
        self._last = record["images_per_second"], record["seconds"]

    def _images_per_second(self) -> float:
        """That of the last record, until more time than its own has passed since; then what was done since."""
        with self._lock:
            speed, interval = self._last_interval
            stages = self._clock.seconds_so_far()
            seconds = sum(spent for stage, spent in stages.items() if stage != PAUSE)
            if seconds <= interval:
                return speed
            return (self._num_steps - self._num_steps_before) * self._batch_size / seconds

    def _held(self, key: str) -> float:
        return getattr(self._counters, key) if self._counters is not None else math.nan

    def _read(self) -> None:
        """Adds to the counters what has happened since they were read last."""
        with self._lock:
            self._read_stages()
            if self._counters is None:
                return
            self._add(self._row_wait, "wait_seconds", self._counters.waited_seconds())
            for key, counter in self._moved.items():
                self._add(counter, key, getattr(self._counters, key))
            for seconds in self._counters.take_fetch_seconds():
                self._fetch_seconds.observe(seconds)

    def _read_stages(self) -> None:
        seconds = self._clock.seconds_so_far()
        for stage in STAGES:
            spent = seconds.get(stage, 0.0)
            self._stage_seconds.labels(stage).inc(max(0.0, spent - self._seen_stages.get(stage, 0.0)))
            self._seen_stages[stage] = max(spent, self._seen_stages.get(stage, 0.0))

    def _add(self, counter: Counter, key: str, total: float) -> None:
        counter.inc(max(0.0, total - self._seen.get(key, 0.0)))
        self._seen[key] = max(total, self._seen.get(key, 0.0))

    def serve(self, port: int, host: str = "127.0.0.1") -> tuple[str, Callable[[], None]]:
        """Serves /metrics on a port, 0 for a free one; returns host:port and a function that stops it.

        Raises:
            OSError: the port is not available.
        """
        try:
            bound, close = serve_metrics(self.registry, host, port)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise OSError(f"cannot serve metrics on port {port} ({reason}): choose another") from error
        return f"{host}:{bound}", close


class _Live(Collector):
    """Calls a function at the beginning of each scrape."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        self._read()
        return iter(())
