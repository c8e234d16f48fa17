"""Runs that earlier versions started keep their settings, even if a default or its spelling has changed since.

A change to either needs a line here. tests/golden/configs_0.1.json has the settings that version 0.1 wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.run.directory import read_settings


def began_earlier(output: Path) -> bool:
    """Whether a version with other defaults started the run in `output`; False if no run can be read there."""
    try:
        return _is_earlier(read_settings(output))
    except ValueError:
        return False


def earlier_defaults(preset: str) -> dict[str, Any]:
    """The defaults in which that version's preset differs."""
    defaults: dict[str, Any] = {"small_crop_scale": (0.05, 0.14), "view_scale": None}
    if preset in ("imagenet-1k", "imagenet-11k"):
        defaults |= {"warmup_epochs": None, "warmup_fraction": 5 / 200, "epochs": 200.0}
    return defaults


def in_todays_terms(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config.json as this version would have written them."""
    if _is_earlier(settings):
        settings = settings | {"warmup_epochs": None, "view_scale": None}
        if "correction" in settings:
            settings["correction"] = "exact" if settings["correction"] else "none"
    return settings


def _is_earlier(settings: dict[str, Any]) -> bool:
    return "warmup_epochs" not in settings
