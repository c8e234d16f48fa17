"""What the cells have measured: read from their directories, kept as JSON, and summarised over seeds."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from experiments.cells import PIXELS, Cell, Claim, Table
from experiments.files import CPU_FILE, EVALUATIONS, RESULT_FILE
from trainer.run.directory import METRICS_FILE
from trainer.run.plot import read_metrics
from weightserver.common.atomic_files import atomic_write

Run = Mapping[str, Any]
"""One run's record: its "id", its "measures", where and when it ran, and for tables over time its "curve"."""
STEPS_SECONDS = "steps_seconds"
"""Measure of tables over time: what all steps took, without evaluations."""
CONFIDENCE = 0.95
"""Of the interval around an effect outside which zero has to lie for the effect to count as shown."""
_CLEAR_SPREADS = 3.0
"""Spreads between seeds from which a difference of two cells needs no further seeds."""


def finished(directory: Path, cell: Cell, seed: int) -> bool:
    """Whether the run and all its evaluations have ended."""
    run = directory / cell.identity(seed)
    files = [run / RESULT_FILE, *(run / EVALUATIONS / f"{each.name}.json" for each in cell.evaluations)]
    return all(file.exists() for file in files)


def read_run(directory: Path, cell: Cell, seed: int) -> Run:
    """The record of a run that has finished."""
    path = directory / cell.identity(seed)
    run: dict[str, Any] = json.loads((path / RESULT_FILE).read_text())
    measures = {name: value for name, value in run["measures"].items() if isinstance(value, int | float)}
    for evaluation in cell.evaluations:
        found = json.loads((path / EVALUATIONS / f"{evaluation.name}.json").read_text())
        measures |= _numbers(found, evaluation.name)
    cpu = path / CPU_FILE
    seconds = float(cpu.read_text()) if cpu.exists() else 0.0
    return run | {"id": cell.identity(seed), "core_seconds": seconds, "measures": measures}


def with_curve(run: Run, records: Sequence[Mapping[str, Any]]) -> Run:
    """The record with [seconds of training, kNN top-1] at each evaluation during training, and before it."""
    seconds = list(itertools.accumulate(record["seconds"] for record in records))
    curve = [
        [round(at, 3), record["knn_top1"]] for at, record in zip(seconds, records, strict=True) if "knn_top1" in record
    ]
    if "initial_knn_top1" in records[0]:
        curve.insert(0, [0.0, records[0]["initial_knn_top1"]])
    return {**run, "curve": curve, "measures": run["measures"] | {STEPS_SECONDS: seconds[-1]}}


def _numbers(content: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The numbers in nested mappings, by dotted names."""
    numbers: dict[str, float] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            numbers |= _numbers(value, f"{prefix}.{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}.{name}"] = value
    return numbers


class Results:
    """The records of a table's cells, by cell's name and then seed."""

    def __init__(self, table: Table, runs: Mapping[str, Mapping[int, Run]]) -> None:
        self.table = table
        self.runs = runs

    def values(self, cell: str, measure: str) -> list[float]:
        """What the cell's runs measured, in the order of their seeds."""
        found = self.runs.get(cell, {})
        return [found[seed]["measures"][measure] for seed in sorted(found) if measure in found[seed]["measures"]]

    def groups(self, measure: str, cells: Collection[str]) -> dict[str, list[float]]:
        """What the runs of the named cells measured, by the first run's id: the same for a cell that is in several
        tables. Raw pixels are left out, which no seed changes."""
        names = [cell.name for cell in self.table.cells if cell.method != PIXELS and cell.name in cells]
        found = {name: self.values(name, measure) for name in names}
        return {min(run["id"] for run in self.runs[name].values()): values for name, values in found.items() if values}


def spread(results: Results, everything: Sequence[Results], measure: str, cells: Collection[str]) -> tuple[float, int]:
    """Standard deviation between seeds of one cell, and its degrees of freedom; NaN and 0 if it is unknown.

    It is pooled over the named cells of a table and, if all of these are runs of about that length on the same images,
    over the trials, whose cells have many seeds.
    """
    groups = results.groups(measure, cells)
    compared = [cell for cell in results.table.cells if cell.name in cells]
    for trials in (each for each in everything if each.table.gives_spread):
        if all(_are_alike(cell, trial) for cell in compared for trial in trials.table.cells):
            groups |= trials.groups(measure, [cell.name for cell in trials.table.cells])
    return pooled(groups.values())


def _are_alike(one: Cell, other: Cell) -> bool:
    """Whether two cells train on as many images of the same data set, and see at most twice as many as each other."""
    first, second = one.config(0), other.config(0)
    ratio = (first.epochs * first.views) / (second.epochs * second.views)
    same = (first.dataset, first.data_dir, first.num_images) == (second.dataset, second.data_dir, second.num_images)
    return same and 0.5 <= ratio <= 2


def pooled(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation within groups, and its degrees of freedom; NaN and 0 if no group has two values."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    if not freedom:
        return math.nan, 0
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
    return math.sqrt(squares / freedom), freedom


def load(file: Path, table: Table) -> Results:
    """The records in a table's JSON; those of cells that it no longer has, or has changed, are dropped."""
    cells = {cell.name: cell for cell in table.cells}
    stored = json.loads(file.read_text())["cells"] if file.exists() else {}
    runs = {
        name: {
            int(seed): run
            for seed, run in stored.get(name, {}).items()
            if run["id"] == cell.identity(int(seed)) and _complete(cell, run)
        }
        for name, cell in cells.items()
    }
    return Results(table, runs)


def _complete(cell: Cell, run: Run) -> bool:
    return all(any(name.startswith(f"{each.name}.") for name in run["measures"]) for each in cell.evaluations)


def collect(directory: Path, file: Path, table: Table, seeds: int) -> Results:
    """Adds the runs in `directory` that have finished to a table's JSON."""

    def record(cell: Cell, seed: int) -> Run:
        run = read_run(directory, cell, seed)
        records = read_metrics(directory / cell.identity(seed) / METRICS_FILE) if table.over_time else []
        return with_curve(run, records) if records else run

    known = load(file, table).runs
    runs = {
        cell.name: {
            **known[cell.name],
            **{seed: record(cell, seed) for seed in range(seeds) if finished(directory, cell, seed)},
        }
        for cell in table.cells
    }
    content = {
        "table": table.name,
        "cells": {name: {str(seed): found[seed] for seed in sorted(found)} for name, found in runs.items()},
    }
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    if any(runs.values()) and (not file.exists() or file.read_text() != text):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, lambda path: path.write_text(text))
    return Results(table, runs)


class Outcome(Enum):
    """What follows from an effect and its standard error."""

    SHOWN = "shown"
    NO_LOSS = "no loss"
    NOT_SHOWN = "not shown"
    REVERSED = "reversed"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim's effect as it was measured."""

    effect: float
    error: float
    """Standard error; NaN if no spread is known."""
    is_clear: bool
    """Whether further seeds are not needed: the effect exceeds three spreads, if it is a difference of two cells."""
    paper: float | None
    """The effect in the paper's numbers; None if it does not have them all."""
    outcome: Outcome

    @property
    def holds(self) -> bool:
        """Whether the claim is not contradicted by what was measured."""
        return self.outcome in (Outcome.SHOWN, Outcome.NO_LOSS)

    @property
    def is_judged(self) -> bool:
        return self.outcome != Outcome.NOT_JUDGED


def verdict(claim: Claim, results: Results, everything: Sequence[Results]) -> Verdict | None:
    """The effect of a claim, and what follows from it; None while a cell has no run.

    A gain or a loss is shown if zero lies outside the effect's confidence interval, by Student's t.

    Args:
        everything: the results of all tables, for the spread between seeds.
    """
    values = {name: results.values(name, claim.measure) for name in claim.weights}
    if not all(values.values()):
        return None
    effect = sum(weight * statistics.mean(values[name]) for name, weight in claim.weights.items())
    deviation, freedom = spread(results, everything, claim.measure, claim.weights)
    error = deviation * math.sqrt(sum(weight**2 / len(values[name]) for name, weight in claim.weights.items()))
    clear = _CLEAR_SPREADS * deviation * math.sqrt(sum(weight**2 for weight in claim.weights.values()) / 2)
    papers = [results.table.paper.get(name, {}).get(claim.measure) for name in claim.weights]
    paper = None
    if None not in papers:
        paper = sum(weight * (number or 0) for weight, number in zip(claim.weights.values(), papers, strict=True))
    return Verdict(
        effect=effect,
        error=error,
        is_clear=abs(effect) >= clear,  # not if the spread is unknown
        paper=paper,
        outcome=_outcome(effect, error * _quantile(freedom), not_below=claim.not_below),
    )


def _quantile(freedom: int) -> float:
    """Half the width of the confidence interval, in standard errors; NaN without degrees of freedom."""
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) if freedom else math.nan


def _outcome(effect: float, half_width: float, *, not_below: bool) -> Outcome:
    if math.isnan(half_width):
        return Outcome.NOT_JUDGED
    if abs(effect) > half_width:
        return Outcome.SHOWN if effect > 0 else Outcome.REVERSED
    return Outcome.NO_LOSS if not_below else Outcome.NOT_SHOWN


def unclear_cells(results: Results, everything: Sequence[Results]) -> set[str]:
    """Names of the cells whose claims cannot be judged without further seeds; all cells if the table claims nothing."""
    if not results.table.claims:
        return {cell.name for cell in results.table.cells}
    unclear: set[str] = set()
    for claim in results.table.claims:
        found = verdict(claim, results, everything)
        if found is None or not found.is_clear:
            unclear |= claim.weights.keys()
    return unclear
