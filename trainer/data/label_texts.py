"""Labels as lists, tables and samples of other programs write them."""

from __future__ import annotations

import os
import re
from typing import Any

MISSING_TEXTS = ("nan", "none", "null")
"""Lower-case texts of a missing value, which among numbers say that an image has no label."""
_NUMBER = re.compile(r"(-?\d{1,18})(?:\.0+)?")


def label_text(value: Any, where: str) -> str:
    """A label in one line; empty for a missing one. Raises ValueError for a list or object, which is no
    label, and for half of a character."""
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, list | dict):
        raise ValueError(
            f"{where}: {str(value)[:30]} is no label: give one for each image, or name another column or key"
        )
    text = " ".join((os.fsdecode(value) if isinstance(value, bytes) else str(value)).split())
    check_text(text, where)
    return text


def check_text(text: str, where: str) -> None:
    """Raises ValueError for a path or label that cannot be written: JSON may have half of a character (\\ud83d)."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"{where}: {text[:100]!r} has half of a character: write it in UTF-8") from None


def label_number(text: str) -> int | None:
    """The number of a label such as 3 or 3.0; −1 if it is empty or negative, None if it is no number of an int64."""
    found = _NUMBER.fullmatch(text or "-1")
    return max(int(found[1]), -1) if found else None
