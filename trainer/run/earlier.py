"""Runs that earlier versions began: a run keeps its settings, also where a default or the way to say it has changed.

A change to either needs a line here. tests/golden/configs_0.1.json has what 0.1 wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def began_earlier(output: Path) -> bool:
    """Whether a version with other defaults began the run in `output`; False where no run can be read there."""
    try:
        return _is_earlier(dict(json.loads((output / "config.json").read_text())))
    except (OSError, ValueError, TypeError):
        return False


def earlier_defaults(preset: str) -> dict[str, Any]:
    """What that version's preset said otherwise."""
    defaults: dict[str, Any] = {"small_crop_scale": (0.05, 0.14), "view_scale": None}
    if preset in ("imagenet-1k", "imagenet-11k"):
        defaults |= {"warmup_epochs": None, "warmup_fraction": 5 / 200, "epochs": 200.0}
    return defaults


def in_todays_terms(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config.json, as this version would have written them."""
    if _is_earlier(settings):
        settings = settings | {"warmup_epochs": None, "view_scale": None}
        if "correction" in settings:
            settings["correction"] = "exact" if settings["correction"] else "none"
    return settings


def _is_earlier(settings: dict[str, Any]) -> bool:
    return "warmup_epochs" not in settings
