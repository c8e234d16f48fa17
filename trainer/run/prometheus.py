"""Prometheus metrics of a trainer process, in a separate registry, updated by the records of metrics.jsonl."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from weightserver.common.metrics_http import serve_metrics

# 1 ms to 60 s: from a step without an encoder and with resident rows to one of a large encoder on a CPU.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

_GAUGES = {
    "loss": "Loss of the last logged step, in nats; chance is the logarithm of the number of active rows.",
    "learning_rate": "Learning rate of the last logged step.",
    "images_per_second": "Images trained on per second, between the last two logged steps.",
    "resident_rows": "Rows that this process holds.",
    "active_rows": "Rows that are the classes of a step.",
    "prefetch_pending_rows": "Rows requested from the weight servers that have not arrived yet.",
    "write_back_pending_rows": "Rows waiting to be written back to the weight servers.",
    "instance_top1": "Percent of a batch's images whose own class has the highest logit of all active rows.",
    "rankme": "RankMe of the newest embeddings: their effective number of dimensions.",
    "feature_std": "Standard deviation of a dimension of L2-normalised embeddings; 0 if all are the same.",
    "mean_cosine": "Mean cosine of two images' embeddings; 1 if all are the same.",
    "gradient_norm": "L2 norm of the encoder's gradient.",
    "row_norm": "Mean L2 norm of the active rows.",
    "online_top1": "Top-1 of the online linear probe in percent, since the last logged step; NaN without one.",
}
"""Key of a record, which is the name after pic_trainer_, to help text; NaN until a record has it."""

_COUNTERS = {
    "row_wait_seconds": ("row_wait_seconds", "Time that training waited for rows."),
    "fetched_bytes": ("row_fetched_bytes", "Bytes of rows fetched from the weight servers."),
    "fetched_rows": ("row_fetched_rows", "Rows fetched from the weight servers."),
    "pushed_bytes": ("row_pushed_bytes", "Bytes of gradients pushed, or rows written back, to the weight servers."),
    "pushed_rows": ("row_pushed_rows", "Rows whose gradients were pushed, or that were written back."),
}
"""Key of a record, whose values are summed, to the name after pic_trainer_ and help text."""


STAGES = ("data", "rows", "forward", "backward", "optimizer", "other")
"""Stages of a step; a record has the seconds of each as NAME_seconds."""


def peak_gpu_bytes(device: torch.device) -> int:
    """Peak memory of this process's tensors on `device`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


class TrainerMetrics:
    """Metrics of one trainer process since it started; safe to scrape from any thread."""

    def __init__(self, *, run: str, rank: int, window_size: int, batch_size: int, device: torch.device) -> None:
        self.registry = CollectorRegistry()
        self._next_step = 0
        info = Info("pic_trainer_run", "Run and rank of this process.", registry=self.registry)
        info.info({"run": run, "rank": str(rank)})
        self._gauge("window_size_rows", "W, rows of the sliding window.").set(window_size)
        self._gauge("batch_size", "B, images in each update, on all ranks together.").set(batch_size)
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
            "fetch_seconds", "Time from requesting rows from the weight servers to their arrival, including retries."
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
        self._counters = {
            key: Counter(f"pic_trainer_{name}", text, registry=self.registry) for key, (name, text) in _COUNTERS.items()
        }

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pic_trainer_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"pic_trainer_{name}", text, buckets=_SECONDS, registry=self.registry)

    def checkpoint_saved(self) -> None:
        self._checkpoint_time.set_to_current_time()

    def observe(self, record: dict[str, Any], *, fetch_seconds: Sequence[float] = ()) -> None:
        """Adds one record of metrics.jsonl and the durations of the fetches since the last one.

        Keys without a metric are ignored. Without num_steps, it counts the steps since the last record, or since step
        0; without batch_size, the number of images follows from images_per_second.
        """
        num_steps = record.get("num_steps", record["step"] + 1 - self._next_step)
        self._next_step = record["step"] + 1
        self._steps.inc(num_steps)
        if "batch_size" in record:
            self._images.inc(num_steps * record["batch_size"])
        else:
            self._images.inc(round(record["images_per_second"] * record["seconds"]))
        for _ in range(num_steps):
            self._step_seconds.observe(record["seconds"] / num_steps)
        for key in self._gauges.keys() & record.keys():
            self._gauges[key].set(record[key])
        for key in self._counters.keys() & record.keys():
            self._counters[key].inc(record[key])
        for stage in STAGES:
            if (key := f"{stage}_seconds") in record:
                self._stage_seconds.labels(stage).inc(record[key])
        for seconds in fetch_seconds:
            self._fetch_seconds.observe(seconds)

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
