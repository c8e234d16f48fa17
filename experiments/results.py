"""What the cells have measured: read from their directories, and kept as JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments.cells import LESS, Cell, Table
from experiments.files import CPU_FILE, EVALUATIONS, RESULT_FILE
from trainer.run.directory import METRICS_FILE, read_metrics
from weightserver.common.atomic_files import atomic_write

Run = Mapping[str, Any]
"""One run's record: its "id", its "measures", where and when it ran, for tables over time its "curve", and where and
when it was "repeated" for the measures that were added since."""
_Runs = dict[str, dict[int, Run]]
"""By cell's name and seed."""
_PROVENANCE = ("processor", "date", "commit")
STEPS_SECONDS = "steps_seconds"
"""Measure of tables over time: what all steps took, without evaluations."""


def finished(directory: Path, cell: Cell, seed: int) -> bool:
    """Whether the run and all its evaluations have ended."""
    run = directory / cell.identity(seed)
    files = [run / RESULT_FILE, *(run / EVALUATIONS / f"{each.name}.json" for each in cell.evaluations)]
    return all(file.exists() for file in files)


def read_run(directory: Path, cell: Cell, seed: int) -> Run:
    """The record of a run that has finished. Raises ValueError if a file of it is damaged."""
    path = directory / cell.identity(seed)
    run = _read(path / RESULT_FILE)
    if not isinstance(found := run.get("measures"), dict):
        raise _damaged(path / RESULT_FILE, "no measures")
    measures = {name: value for name, value in found.items() if isinstance(value, int | float)}
    for evaluation in cell.evaluations:
        measures |= _numbers(_read(path / EVALUATIONS / f"{evaluation.name}.json"), evaluation.name)
    seconds = read_cpu_seconds(path)
    return run | {"id": cell.identity(seed), "core_seconds": seconds, "measures": measures}


def read_cpu_seconds(run: Path) -> float:
    """Processor time that a run has taken so far, in seconds: 0 if it is unknown."""
    try:
        return float((run / CPU_FILE).read_text())
    except (OSError, ValueError):
        return 0.0


def _read(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(file, "not an object")
    return content


def _damaged(file: Path, why: str) -> ValueError:
    return ValueError(f"{file} is damaged ({why}): remove it, and the cell runs again from there")


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
        name, _, less = measure.partition(LESS)
        measured = [run["measures"] for _, run in sorted(self.runs.get(cell, {}).items())]
        return [each[name] - each.get(less, 0) for each in measured if name in each and (not less or less in each)]

    def first_id(self, cell: str) -> str:
        """The same for a cell that is in several tables."""
        return min(str(run["id"]) for run in self.runs[cell].values())


def load(file: Path, table: Table) -> Results:
    """The records in a table's JSON, without those of cells that it no longer has, or has changed or evaluates in more
    ways.

    Raises ValueError if it is no such file.
    """
    stored = _stored(file, table)
    complete = {
        cell.name: {seed: run for seed, run in stored[cell.name].items() if _complete(cell, run)}
        for cell in table.cells
    }
    return Results(table, complete)


def _stored(file: Path, table: Table) -> _Runs:
    """The records of a table's cells in its JSON, also those that lack an evaluation which was added since."""
    runs: _Runs = {cell.name: {} for cell in table.cells}
    for cell, seed, run in _of_cells(file, table):
        if cell is not None:
            runs[cell.name][seed] = run
    return runs


def check_results(file: Path, table: Table) -> None:
    """Raises ValueError if a table's JSON has records of cells that the table lacks: they would be dropped."""
    if dropped := sorted({run["id"] for cell, _, run in _of_cells(file, table) if cell is None}):
        raise ValueError(
            f"{file} has {len(dropped)} runs of other cells than table {table.name} ({dropped[0]}), which would be "
            "lost: remove them from the file, or give another --results"
        )


def _of_cells(file: Path, table: Table) -> Iterator[tuple[Cell | None, int, Run]]:
    """The records in a table's JSON with their seeds and cells, None for those of cells that the table lacks."""
    cells = {cell.name: cell for cell in table.cells}
    try:
        stored = json.loads(file.read_text())["cells"] if file.exists() else {}
        found = [(name, int(seed), run, run["id"]) for name, runs in stored.items() for seed, run in runs.items()]
        for *_, run, identity in found:
            if not all(isinstance(number, int | float) for number in [run["core_seconds"], *run["measures"].values()]):
                raise ValueError(f"run {identity} has measures that are no numbers")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a table's results ({error!r}): restore it, or remove it") from error
    for name, seed, run, identity in found:
        cell = cells.get(name)
        yield cell if cell is not None and cell.identity(seed) == identity else None, seed, run


def _complete(cell: Cell, run: Run) -> bool:
    return all(any(name.startswith(f"{each.name}.") for name in run["measures"]) for each in cell.evaluations)


def records(file: Path, table: Table) -> dict[str, Run]:
    """The records of a table's cells in its JSON, by run."""
    return {run["id"]: run for runs in _stored(file, table).values() for run in runs.values()}


def collect(
    directory: Path, file: Path, table: Table, seeds: int, recorded: Mapping[str, Run] = MappingProxyType({})
) -> Results:
    """Adds the runs in `directory` that have finished to a table's JSON.

    A run whose directory was lost runs again if another cell continues it, or if it lacks an evaluation. What was
    measured before, as the JSON has it or `recorded` by run, stays as it is; the record says in what the repetition
    differs.
    """
    known = _stored(file, table)

    def record(cell: Cell, seed: int) -> Run:
        run: Run = read_run(directory, cell, seed)
        if before := known[cell.name].get(seed) or recorded.get(run["id"]):
            repetition = {name: run[name] for name in _PROVENANCE if run.get(name) != before.get(name)}
            if repetition and not run["measures"].keys() <= before["measures"].keys():
                before = {**before, "repeated": repetition}
            seconds = max(run["core_seconds"], before["core_seconds"])  # those of one of the two
            run = {**run, **before, "core_seconds": seconds, "measures": run["measures"] | before["measures"]}
        steps = read_metrics(directory / cell.identity(seed) / METRICS_FILE) if table.over_time else []
        return with_curve(run, steps) if steps else run

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
    return load(file, table)
