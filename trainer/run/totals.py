"""What a run has used so far, over all of its parts: its checkpoints carry it from one part to the next."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainer.run.checkpoint_file import file_path, read_metadata
from trainer.run.directory import read_summary
from trainer.run.prometheus import peak_gpu_bytes
from trainer.settings import settings_of
from weightserver.torch import Ranks, RowCounters

TOTALS = "totals"
"""Key of a checkpoint file's metadata."""

_SUMMED = ("fetched_rows", "pushed_rows", "corrected_rows", "missed_steps")
"""Counters of the row store that are summed, over ranks and parts."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What led to a run's state: steps that a resumed part repeated do not count twice."""

    parts: int = 0
    """How often the run was started or resumed."""
    train_seconds: float = 0.0
    fetched_rows: int = 0
    pushed_rows: int = 0
    corrected_rows: int = 0
    missed_steps: int = 0
    largest_gap: int = 0
    peak_memory_bytes: int = 0


class Usage:
    """The totals of a run while it trains.

    Args:
        before: the totals of its earlier parts; only those on rank 0 matter.
        started: when this part started, on the clock of `time.perf_counter`.
    """

    def __init__(self, before: Totals, started: float, counters: RowCounters, ranks: Ranks) -> None:
        self._before = before
        self._started = started
        self._counters = counters
        self._ranks = ranks

    def now(self) -> Totals:
        """The totals up to now; every rank must call it together."""
        before, counters = self._before, self._counters
        sums = self._ranks.sum_over_ranks([float(getattr(counters, name)) for name in _SUMMED])
        (largest_gap,) = self._ranks.max_over_ranks([float(counters.largest_gap)])
        return Totals(
            parts=before.parts + 1,
            train_seconds=before.train_seconds + time.perf_counter() - self._started,
            **{name: getattr(before, name) + round(value) for name, value in zip(_SUMMED, sums, strict=True)},
            largest_gap=max(before.largest_gap, round(largest_gap)),
            peak_memory_bytes=max(before.peak_memory_bytes, _peak_memory_bytes(self._ranks.device)),
        )


def totals_at(output: Path, step: int) -> Totals:
    """The totals of the run in `output` at its checkpoint of `step`."""
    path = file_path(output / "checkpoints", step)
    totals = settings_of(Totals, json.loads(read_metadata(path)[TOTALS])) if path.exists() else Totals()
    summary = read_summary(output)
    if summary.get("steps") == step:  # the run ended there, a little later
        totals = replace(totals, train_seconds=max(totals.train_seconds, summary.get("train_seconds", 0.0)))
    return totals


def _peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of the GPU if there is one, otherwise of this process."""
    if device.type == "cuda":
        return peak_gpu_bytes(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
