"""Takes over runs that were trained elsewhere with the settings of a cell."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

from experiments.cells import PIC, Cell, Table
from experiments.files import RESULT_FILE
from trainer.config import RESUMABLE, TrainConfig
from trainer.run.directory import CONFIG_FILE, ENCODER_FILE, METRICS_FILE, SUMMARY_FILE, flat, read_config
from weightserver.common.atomic_files import atomic_write

_WITHOUT_EFFECT = RESUMABLE - {"labels", "rows"} | {"resume_step", "warmup_fraction"}
"""Settings that change no number that is compared, or follow from others."""
_FOUND_BY_RUN = ("encoder.pixel_mean", "encoder.pixel_std")


def import_runs(runs: Path, directory: Path, tables: Sequence[Table]) -> Iterator[str]:
    """Copies the results of each finished run below `runs` whose settings are those of a cell; yields what it copied.

    Raises:
        ValueError: `runs` is no folder, or a run's files are damaged.
    """
    if not runs.is_dir():
        raise ValueError(f"{runs} is not a folder: give one that holds run directories")
    cells = [
        cell
        for table in tables
        for cell in table.cells
        if cell.method == PIC and "data_dir" not in cell.settings and not table.over_time
    ]
    for summary in sorted(runs.glob(f"*/{SUMMARY_FILE}")):
        settings = read_config(summary.parent)
        for cell in cells:
            if _is_run_of(cell, settings):
                _copy(summary.parent, directory / cell.identity(settings["seed"]))
                yield f"{summary.parent}: {cell.name}, seed {settings['seed']}"
                break


def _is_run_of(cell: Cell, settings: Mapping[str, Any]) -> bool:
    """Whether a run had the cell's settings; one that its version did not know had today's default."""
    wanted = _compared(json.loads(cell.config(settings["seed"]).to_json()))
    default = _compared(json.loads(TrainConfig().to_json()))
    had = _compared(settings)
    return all(had.get(name, default.get(name)) == value for name, value in wanted.items())


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(TrainConfig)} - _WITHOUT_EFFECT
    named = flat({name: value for name, value in settings.items() if name in known})
    return {name: value for name, value in named.items() if name not in _FOUND_BY_RUN}


def _copy(run: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, ENCODER_FILE):
        if (run / name).exists():
            shutil.copyfile(run / name, directory / name)
    ended = date.fromtimestamp((run / SUMMARY_FILE).stat().st_mtime)
    result = {"measures": json.loads((run / SUMMARY_FILE).read_text()), "date": ended.isoformat()}
    text = json.dumps(result, indent=2) + "\n"
    atomic_write(directory / RESULT_FILE, lambda path: path.write_text(text))
