"""A run's records: metrics.jsonl, TensorBoard, Weights & Biases, progress, Prometheus metrics."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from trainer.config import TrainConfig
from trainer.display import counting, notify
from trainer.display import stage as shown_stage
from trainer.run.directory import METRICS_FILE, read_metrics
from trainer.run.prometheus import PAUSE, STAGES, TrainerMetrics
from trainer.run.weights_and_biases import weights_and_biases
from weightserver.common.stages import StageClock
from weightserver.torch import Ranks, RowCounters

_log = logging.getLogger(__name__)
_SUMMED = ("fetched_rows", "fetched_bytes", "pushed_rows", "pushed_bytes", "corrected_rows", "missed_steps")
_HELD = ("resident_rows", "prefetch_pending_rows", "write_back_pending_rows")
"""Counters of the row store: those whose increase a record has, and those whose value it has."""


class _Interval:
    """The time and the rows of one rank since the last logged step."""

    def __init__(self, counters: RowCounters, clock: StageClock) -> None:
        clock.start("other")
        self._counters, self._clock = counters, clock
        self._started, self._seconds_before = time.perf_counter(), clock.seconds.copy()
        self._row_wait_before = counters.wait_seconds
        self._before = {name: getattr(counters, name) for name in _SUMMED}

    def seconds(self) -> float:
        return time.perf_counter() - self._started - self._of_stage(PAUSE)

    def _of_stage(self, name: str) -> float:
        return self._clock.seconds[name] - self._seconds_before[name]

    def largest(self) -> dict[str, float]:
        """What a record has of the rank with the largest value: seconds of each stage and of waiting for rows, and the
        run's largest gap."""
        waits = {f"{name}_seconds": self._of_stage(name) for name in STAGES}
        waits |= {"row_wait_seconds": self._counters.wait_seconds - self._row_wait_before}
        return waits | {"largest_gap": self._counters.largest_gap}

    def rows(self) -> dict[str, int]:
        moved = {name: getattr(self._counters, name) - self._before[name] for name in _SUMMED}
        return moved | {name: getattr(self._counters, name) for name in _HELD}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror})") from None


def lines_of(path: Path, stack: ExitStack) -> Callable[[dict[str, Any]], None]:
    """A function that appends a record to a metrics.jsonl at once, until `stack` ends; its OSError names the file."""
    lines = stack.enter_context(path.open("ab", buffering=0))

    def write(record: dict[str, Any]) -> None:
        content = json.dumps(record).encode() + b"\n"
        with _naming(path):
            while content:  # only a part of it may fit
                content = content[lines.write(content) :]

    return write


class Recorder:
    """Measures one rank's training between logged steps; on rank 0 it also writes the records of all ranks.

    It serves the rank's Prometheus metrics from the start, and measures from `follow` on; `stack` closes what it opens.
    """

    def __init__(self, config: TrainConfig, num_images: int, ranks: Ranks, stack: ExitStack) -> None:
        self._stack = stack
        self._config = config
        self._num_images = num_images
        self._ranks = ranks
        self._counters = RowCounters()
        self._sinks: list[Callable[[dict[str, Any]], object]] = []
        """What takes each record: metrics.jsonl, TensorBoard, Weights & Biases, the progress; empty on other ranks."""
        self._num_steps = config.optimization.num_steps(num_images)
        self._metrics = TrainerMetrics(
            run=config.run.name,
            rank=ranks.rank,
            window_size=config.sampling.window_size,
            batch_size=config.optimization.batch_size,
            num_steps=self._num_steps,
            device=ranks.device,
        )
        self._clock = self._metrics.clock
        self._next_step = 0
        self._accuracy = ""
        if config.report.metrics_port is not None:
            self._serve(config.report.metrics_port and config.report.metrics_port + ranks.local_rank)

    def _serve(self, port: int) -> None:
        address, stop = self._metrics.serve(port, self._config.report.metrics_host)
        self._stack.callback(stop)
        if self._config.report.log_format == "json":
            _log.info("metrics served", extra={"address": address})
        else:
            print(f"rank {self._ranks.rank}: metrics on http://{address}/metrics", flush=True)

    def follow(self, counters: RowCounters, start_step: int) -> None:
        """Starts the first interval, of steps from `start_step` on; `counters` are those of the run's row store."""
        self._counters = counters
        self._metrics.follow(counters)
        self._next_step = start_step
        if self._ranks.is_first:
            self._open_outputs(start_step)
        self._interval = _Interval(counters, self._clock)

    def _open_outputs(self, start_step: int) -> None:
        config, enter = self._config, self._stack.enter_context
        events = config.run.output / "tensorboard"
        board = enter(SummaryWriter(str(events), purge_step=start_step))

        def to_board(record: dict[str, Any]) -> None:
            with _naming(events):
                for name in record.keys() - {"step"}:
                    board.add_scalar(name, record[name], record["step"])

        self._sinks = [lines_of(config.run.output / METRICS_FILE, self._stack), to_board]
        if config.report.wandb_project:
            self._sinks.append(enter(weights_and_biases(config, config.report.wandb_project)))
        self._progress = enter(counting("", self._num_steps, done=start_step))
        for record in deque(read_metrics(config.run.output / METRICS_FILE), maxlen=1):  # of the part before
            self._show(record)
        self._sinks.append(self._show)

    def _show(self, record: dict[str, Any]) -> None:
        """Shows a record, and the kNN accuracy of an earlier one."""
        accuracy = f"kNN {record['knn_top1']:.1f} %" if "knn_top1" in record else self._accuracy
        data, rows = (f"{record[name] / record['seconds']:.0%}" for name in ("data_seconds", "row_wait_seconds"))
        chance, speed = self._config.loss.chance(self._config.rows.num_negatives), record["images_per_second"]
        numbers = [f"loss {record['loss']:.2f} (chance {chance:.2f})", f"{speed:,.0f} images/s", accuracy]
        self._progress.numbers = ", ".join(filter(None, [*numbers, f"wait {data} data {rows} rows"]))
        self._accuracy = accuracy

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Attributes the time inside to one stage of a step; all other time is "other".

        The stages: making a batch's views ("data"), requesting, awaiting or moving rows ("rows"), "forward",
        "backward", "optimizer". A GPU works while the program continues: its time appears where its results are
        awaited.
        """
        self._clock.start(name)
        try:
            yield
        finally:
            self._clock.start("other")

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Leaves the time inside out of the record, and so of images_per_second; the terminal shows `name`."""
        with self.stage(PAUSE), shown_stage(name):
            yield

    def note_signal(self) -> None:
        """Says at once that the run will stop; called in a signal handler, which must not use a buffered stream."""
        message = "stopping after this step"
        if not notify(message) and self._ranks.is_first and self._config.report.log_format == "text":
            with suppress(OSError):  # Ctrl-C has ended who reads stderr too, as after `2>&1 | tee`
                os.write(sys.stderr.fileno(), f"trainer: {message}\n".encode())

    def advance(self, step: int) -> None:
        """Counts and shows a step that is done."""
        self._metrics.step_finished()
        if self._ranks.is_first:
            of_epoch = self._num_images / self._config.optimization.batch_size
            self._progress.what = f"epoch {(step + 1) / of_epoch:.4g} of {self._num_steps / of_epoch:.4g}"
            self._progress.update(step + 1, self._num_steps)

    def checkpoint_saved(self) -> None:
        self._metrics.checkpoint_saved()

    def measure(
        self, step: int, loss: float, learning_rate: float, active_rows: int, monitored: dict[str, float]
    ) -> dict[str, Any]:
        """The record of all ranks' steps since the last one, which ends the interval. Every rank must call it.

        Rows and bytes are sums over ranks, times those of the slowest rank; active_rows_share is the largest share of
        the active rows on one rank, 1.0 if all ranks have the same number. `monitored` are further fields of the
        record, the same on every rank.
        """
        interval, ranks = self._interval, self._ranks
        self._clock.start("other")
        seconds = interval.seconds()
        num_steps = step + 1 - self._next_step
        common = {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "images_per_second": num_steps * self._config.optimization.batch_size / seconds,
            "seconds": seconds,
        } | monitored
        own, rows = interval.largest(), interval.rows() | {"active_rows": active_rows}
        sums = ranks.sum_over_ranks([float(value) for value in rows.values()])
        total = dict(zip(rows, map(round, sums), strict=True))
        self._metrics.observe(common | {"active_rows": total["active_rows"]})
        *longest, largest = ranks.max_over_ranks([*own.values(), float(active_rows)])
        self._next_step = step + 1
        self._interval = _Interval(self._counters, self._clock)
        share = largest * ranks.world_size / max(1, total["active_rows"])
        return common | dict(zip(own, longest, strict=True)) | total | {"active_rows_share": share}

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record on rank 0; does nothing on other ranks."""
        for sink in self._sinks:
            sink(record)
