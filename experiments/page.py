"""Writes docs/results.md and its plots from the tables and what their cells have measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.cells import Table


def write(tables: Sequence[Table], results: Path, docs: Path) -> None:
    """Writes the page."""
