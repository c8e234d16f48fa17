"""Prometheus metrics of a trainer process, in a separate registry.

What a step does, and what it waits for, is read at each scrape, so that a step which does not end shows; the loss and
the monitors are those of the newest record of metrics.jsonl. Fetches are metrics of the `WeightClient`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from prometheus_client import Counter, Gauge, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from weightserver import WeightClient
from weightserver.common.metrics import Registry
from weightserver.common.metrics_http import serve_metrics
from weightserver.common.stages import StageClock
from weightserver.torch import RowCounters

_GAUGES = {
    "loss": "Loss of the last logged step, in nats; chance, without a margin, is the logarithm of active_rows.",
    "learning_rate": "Learning rate of the last logged step.",
    "active_rows": "Rows that are the classes of a step, those of all ranks.",
    "instance_top1": "Percent of a batch's images whose own class has the highest logit of all active rows.",
    "rankme": "RankMe of the newest embeddings: their effective number of dimensions.",
    "feature_std": "Standard deviation of a dimension of L2-normalised embeddings; 0 if all are the same.",
    "mean_cosine": "Mean cosine of two images' embeddings; 1 if all are the same.",
    "gradient_norm": "L2 norm of the encoder's gradient.",
    "row_norm": "Mean L2 norm of the active rows.",
}
"""Key of a record, which is the name after pic_trainer_, to help text; NaN if the newest record lacks it."""

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
        self, *, run: str, rank: int, window_size: int, batch_size: int, num_steps: int, device: torch.device
    ) -> None:
        self.registry = Registry(run=run, rank=str(rank))
        self._batch_size = batch_size
        self.clock = StageClock("other")
        self._live = _Live(self.clock)
        self.registry.register(self._live)
        self.registry.register(WeightClient.metrics())
        Info("pic_trainer_run", "Run and rank of this process, which all of its metrics have.", registry=self.registry)
        self._gauge("window_size_rows", "W, rows of the sliding window.").set(window_size)
        self._gauge("batch_size", "B, images in each update, on all ranks together.").set(batch_size)
        self._gauge("run_steps", "Steps of the whole run.").set(num_steps)
        self._steps = Counter("pic_trainer_steps", "Finished steps.", registry=self.registry)
        self._images = Counter("pic_trainer_images", "Images trained on.", registry=self.registry)
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

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pic_trainer_{name}", text, registry=self.registry)

    def checkpoint_saved(self) -> None:
        self._checkpoint_time.set_to_current_time()

    def follow(self, counters: RowCounters) -> None:
        """Shows what the row store counts."""
        self._live.counters = counters

    def step_finished(self) -> None:
        self._steps.inc()
        self._images.inc(self._batch_size)

    def observe(self, record: dict[str, Any]) -> None:
        """Shows a record of metrics.jsonl; keys without a metric are ignored, what it lacks is unknown."""
        for key, gauge in self._gauges.items():
            gauge.set(record.get(key, math.nan))

    def serve(self, port: int, host: str = "127.0.0.1") -> tuple[str, Callable[[], None]]:
        """Serves /metrics on a port, 0 for a free one; returns host:port and a function that stops it.

        Raises:
            OSError: the host is none of this machine's, or the port is taken.
        """
        try:
            bound, close = serve_metrics(self.registry, host, port)
        except OSError as error:
            raise OSError(
                f"cannot serve metrics on port {port} of {host} ({error.strerror}): give another --metrics-port, or "
                "another --metrics-host"
            ) from error
        return f"{host}:{bound}", close


class _Live(Collector):
    """What a step does and waits for. It is read while other threads change it, so each counter shows its maximum."""

    def __init__(self, clock: StageClock) -> None:
        self.counters = RowCounters()
        self._clock, self._lock = clock, threading.Lock()
        self._seconds, self._waited = dict.fromkeys(STAGES, 0.0), 0.0

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            now = self._clock.seconds_so_far()
            self._seconds = {stage: max(seconds, now.get(stage, 0.0)) for stage, seconds in self._seconds.items()}
            self._waited = max(self._waited, self.counters.waited_seconds())
            by_stage, waited = self._seconds, self._waited
        text = "Time of each stage of the steps; a GPU's time appears where its results are awaited."
        stages = CounterMetricFamily("pic_trainer_stage_seconds", text, labels=["stage"])
        for stage, seconds in by_stage.items():
            stages.add_metric([stage], seconds)
        yield stages
        yield CounterMetricFamily("pic_trainer_row_wait_seconds", "Time that training waited for rows.", waited)
