"""What runs have measured: read from their directories, and kept as JSON by run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from experiments.cells import Cell, Table
from weightserver.common.atomic_files import atomic_write

CELL_FILE = "cell.json"
"""In a run's directory: what to run."""
RESULT_FILE = "result.json"
"""What the run measured, after it has ended."""
CPU_FILE = "cpu_seconds.json"
"""Processor time so far, over all its processes."""
LOG_FILE = "log.txt"
EVALUATIONS = "evaluation"
"""Folder of the results of evaluations, NAME.json."""
RUNS_FILE = "runs.json"
"""In a folder of results: what all runs have measured."""
Run = Mapping[str, Any]
"""One run's record: its "measures", the digest of its data set's "images", and where and when it ran."""
Runs = Mapping[str, Run]
"""Records by the run's identity."""


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
    return run | {"core_seconds": read_cpu_seconds(path), "measures": measures}


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


def _numbers(content: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The numbers in nested mappings, by dotted names."""
    numbers: dict[str, float] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            numbers |= _numbers(value, f"{prefix}.{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}.{name}"] = value
    return numbers


def has_run(runs: Runs, cell: Cell, seed: int) -> bool:
    """Whether there is a record with all its evaluations."""
    measures = runs.get(cell.identity(seed), {}).get("measures", {})
    return bool(measures) and all(any(n.startswith(f"{each.name}.") for n in measures) for each in cell.evaluations)


def seeds_of(runs: Runs, cell: Cell) -> list[int]:
    """The seeds with which a cell has run."""
    stem = cell.identity(0).removesuffix("0")
    seeds = sorted(int(identity.removeprefix(stem)) for identity in runs if identity.startswith(stem))
    return [seed for seed in seeds if has_run(runs, cell, seed)]


def values(runs: Runs, cell: Cell, measure: str) -> dict[int, float]:
    """What a cell's runs measured, by seed."""
    measured = {seed: runs[cell.identity(seed)]["measures"] for seed in seeds_of(runs, cell)}
    return {seed: float(found[measure]) for seed, found in measured.items() if measure in found}


def load(folder: Path) -> dict[str, Run]:
    """The records in a folder of results. Raises ValueError if they are damaged."""
    file = folder / RUNS_FILE
    try:
        found: dict[str, Run] = json.loads(file.read_text()) if file.exists() else {}
        for identity, run in found.items():
            if not all(isinstance(number, int | float) for number in [run["core_seconds"], *run["measures"].values()]):
                raise ValueError(f"run {identity} has measures that are no numbers")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} has no results of runs ({error!r}): restore it, or remove it") from error
    return found


def collect(directory: Path, folder: Path, tables: Iterable[Table], seeds: int) -> dict[str, Run]:
    """Adds the runs in `directory` that have finished to a folder of results. Numbers that are there stay as they are:
    a run may be repeated on another processor, for an evaluation that it lacks."""
    known = load(folder)
    runs = dict(known)
    for cell, seed in product([cell for table in tables for cell in table.cells], range(seeds)):
        if finished(directory, cell, seed) and not has_run(runs, cell, seed):
            run, before = read_run(directory, cell, seed), runs.get(cell.identity(seed), {})
            runs[cell.identity(seed)] = {**run, **before, "measures": run["measures"] | before.get("measures", {})}
    if runs != known:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(runs, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        atomic_write(folder / RUNS_FILE, lambda path: path.write_text(text))
    return runs
