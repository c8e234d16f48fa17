"""Settings that cells leave to defaults: runs of tables are comparable only while these stay as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from experiments.baselines.methods import METHODS
from experiments.cells import PIC
from trainer.config import RESUMABLE
from trainer.data.config import usual
from trainer.presets import PRESETS
from weightserver.common.atomic_files import atomic_write

DEFAULTS_FILE = "defaults.json"
"""In a folder of runs or results: the defaults that they were made with."""


def defaults() -> dict[str, dict[str, Any]]:
    """Method or preset to name of a setting to its default, as in JSON; without settings that change no number."""
    presets = {PIC: "fashion-mnist", "cifar-10": "cifar-10"}
    trainers = {name: json.loads(PRESETS[preset][1].to_json()) for name, preset in presets.items()}
    changing = {
        name: {setting: value for setting, value in each.items() if setting not in RESUMABLE and setting != "output"}
        for name, each in trainers.items()
    }
    return changing | {
        method: {
            name: given.default
            for name, given in signature(build).parameters.items()
            if given.kind is given.KEYWORD_ONLY
        }
        for method, build in METHODS.items()
    }


def check_defaults(folder: Path) -> None:
    """Raises ValueError if the runs or results of a folder were made with other defaults; writes those it lacks.

    A setting that did not exist then is taken to have changed nothing.
    """
    file, today = folder / DEFAULTS_FILE, _flat(defaults())
    made = _flat(json.loads(file.read_text())) if file.exists() else {}
    for name, value in made.items():
        now, option = today.get(name, value), name.partition(".")[2]
        if usual(option, now) != usual(option, value):
            raise ValueError(
                f"{folder} was made with the default {name} {value}, which is {now} now: give another folder, or "
                f"remove its runs or results and {DEFAULTS_FILE}"
            )
    if today.keys() - made.keys():
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(today | made, indent=1) + "\n"
        atomic_write(file, lambda path: path.write_text(text))


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted names."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
