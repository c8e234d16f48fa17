"""What a run tells: its directory, metrics.jsonl, TensorBoard, Weights & Biases, progress line, Prometheus metrics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.tensorboard import SummaryWriter

from trainer.config import TrainConfig
from trainer.distributed import Ranks
from trainer.rows import RowCounters
from trainer.run.checkpoint import check_same_run, config_path, saved_steps, set_newer_aside, update_settings
from trainer.run.directory import ENCODER_FILE, SUMMARY_FILE
from trainer.run.progress import TrainingProgress
from trainer.run.prometheus import STAGES, TrainerMetrics
from trainer.run.weights_and_biases import weights_and_biases
from weightserver.common.atomic_files import atomic_write, make_directory, sync
from weightserver.common.stages import StageClock

_SUMMED = ("fetched_rows", "fetched_bytes", "pushed_rows", "pushed_bytes")
"""Where a step's time goes; a record has NAME_seconds of each."""
_HELD = ("resident_rows", "prefetch_pending_rows", "write_back_pending_rows")


class Report:
    """Measures one rank's training between two logged steps, and lets rank 0 tell what all did.

    A context manager; `follow` tells whose counters are read. A run that fails before its first checkpoint and step
    lets go of its directory, so that it can be tried again.

    Raises:
        ValueError: a directory that another run used, or that cannot be written.
    """

    def __init__(self, config: TrainConfig, num_steps: int, ranks: Ranks, device: torch.device) -> None:
        self._config = config
        self._num_steps = num_steps
        self._ranks = ranks
        self._counters = RowCounters()
        self._metrics = TrainerMetrics(
            run=config.output.name,
            rank=ranks.rank,
            window_size=config.window_size,
            batch_size=config.batch_size,
            device=device,
        )
        self._next_step = 0
        self._has_begun = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self._ranks.is_first:
                if self._config.resume:
                    check_same_run(self._config)
                else:
                    _claim_output(self._config)
                    stack.push(self._let_go)
            if self._config.metrics_port is not None:
                port = self._config.metrics_port and self._config.metrics_port + self._ranks.local_rank
                address, stop = self._metrics.serve(port, self._config.metrics_host)
                stack.callback(stop)
                print(f"rank {self._ranks.rank}: metrics on http://{address}/metrics", flush=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _let_go(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._has_begun:
            config_path(self._config).unlink(missing_ok=True)

    def follow(self, counters: RowCounters, start_step: int) -> None:
        """Begins the first interval, of steps from `start_step` on, which `counters` belong to."""
        self._has_begun = True
        self._counters = counters
        self._next_step = start_step
        if self._ranks.is_first:
            output = self._config.output
            if self._config.resume:
                update_settings(self._config)
                results = [output / SUMMARY_FILE, output / ENCODER_FILE]  # there are others to come
                set_newer_aside(output / "checkpoints", start_step, results, output / "metrics.jsonl")
            _forget_from(output / "metrics.jsonl", start_step)
            self._lines = self._stack.enter_context((output / "metrics.jsonl").open("a"))
            self._board = self._stack.enter_context(SummaryWriter(str(output / "tensorboard"), purge_step=start_step))
            chance = math.log(self._config.num_negatives)
            shown = self._config.log_format == "text"  # among lines of JSON there is no other
            project = self._config.wandb_project
            self._log_there = self._stack.enter_context(weights_and_biases(self._config, project)) if project else None
            self._progress = self._stack.enter_context(TrainingProgress(self._num_steps, chance=chance, shown=shown))
        self._begin()

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self._clock = StageClock("other")
        counters = self._counters
        self._row_wait_before = counters.wait_seconds
        self._before = {name: getattr(counters, name) for name in _SUMMED}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time in it as of one stage: making a batch's views ("data"), asking for rows, waiting for them or
        moving them ("rows"), "forward", "backward", "optimizer". The time outside of all is "other".

        A GPU works while the program continues: what it takes is seen where its results are waited for.
        """
        self._clock.start(name)
        try:
            yield
        finally:
            self._clock.start("other")

    def checkpoint_saved(self) -> None:
        self._has_begun = True
        self._metrics.checkpoint_saved()

    def measure(self, step: int, loss: float, learning_rate: float, active_rows: int) -> dict[str, Any]:
        """The record of all ranks' steps since the last one; each rank must call it, and begins the next interval.

        Rows and bytes are sums over ranks, times those of the rank that took longest; active_rows_share is the
        largest share of the active rows that a rank has, 1.0 where all have the same.
        """
        counters, ranks = self._counters, self._ranks
        self._clock.start("other")
        seconds = time.perf_counter() - self._started
        num_steps = step + 1 - self._next_step
        common = {
            "step": step,
            "loss": loss,
            "learning_rate": learning_rate,
            "images_per_second": num_steps * self._config.batch_size / seconds,
            "seconds": seconds,
        }
        waits = {f"{name}_seconds": self._clock.seconds.get(name, 0.0) for name in STAGES}
        waits["row_wait_seconds"] = counters.wait_seconds - self._row_wait_before
        rows = {name: getattr(counters, name) - self._before[name] for name in _SUMMED}
        rows |= {name: getattr(counters, name) for name in _HELD} | {"active_rows": active_rows}
        fetches = counters.fetch_seconds[:]
        del counters.fetch_seconds[: len(fetches)]  # others may have come since
        self._metrics.observe(common | waits | rows | {"num_steps": num_steps}, fetch_seconds=fetches)
        total = dict(
            zip(rows, map(round, ranks.sum_over_ranks([float(value) for value in rows.values()])), strict=True)
        )
        *longest, largest = ranks.max_over_ranks([*waits.values(), float(active_rows)])
        self._next_step = step + 1
        self._begin()
        return (
            common
            | dict(zip(waits, longest, strict=True))
            | total
            | {"active_rows_share": largest * ranks.world_size / max(1, total["active_rows"])}
        )

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record, where this is rank 0."""
        if not self._ranks.is_first:
            return
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()
        for name in record.keys() - {"step"}:
            self._board.add_scalar(name, record[name], record["step"])
        if self._log_there is not None:
            self._log_there(record)
        self._progress.update(record)


def _forget_from(path: Path, step: int) -> None:
    """Removes the records of `step` and later from a metrics.jsonl, and one that was cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
    atomic_write(path, lambda new: new.write_text("".join(kept)))


def _claim_output(config: TrainConfig) -> None:
    """Makes the run's directory and writes config.json."""
    path = config_path(config)
    files = [config.output / name for name in ("metrics.jsonl", SUMMARY_FILE, ENCODER_FILE)]
    there = [file.name for file in files if file.exists()]
    if not path.exists() and (there or saved_steps(config.output / "checkpoints")):
        raise ValueError(
            f"{config.output} holds {there[0] if there else 'checkpoints'} of a run whose {path.name} is missing: "
            "put it back to go on with that run, or choose another --output"
        )
    try:
        make_directory(config.output)
        with path.open("x") as file:
            file.write(config.to_json())
        sync(path)
        sync(config.output)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():
            raise ValueError(f"{config.output} holds another run: choose another --output, or delete it") from None
        raise ValueError(
            f"--output {config.output} cannot be used ({error.strerror}): choose another directory"
        ) from None
