"""Runs that earlier versions started keep their settings, even if a default or its spelling has changed since.

A change to either needs a line here. tests/golden/configs_0.1.json has the settings that version 0.1 wrote.
"""

from __future__ import annotations

from typing import Any


def in_todays_terms(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config.json as this version would have written them."""
    if _is_earlier(settings):
        settings = settings | {"warmup_epochs": None, "view_scale": None}
        if "correction" in settings:
            settings["correction"] = "exact" if settings["correction"] else "none"
    return {"background": "none"} | settings  # versions without the setting dropped transparency


def _is_earlier(settings: dict[str, Any]) -> bool:
    return "warmup_epochs" not in settings
