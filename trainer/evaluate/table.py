"""Tables of results: of an evaluation, and of a trained encoder beside the untrained one and raw pixels."""

import logging
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.display import stage
from trainer.evaluate.features import FeatureSet
from trainer.evaluate.knn import knn_top1
from trainer.evaluate.linear_cached import linear_top1
from trainer.evaluate.protocol import ProbeResult
from weightserver.common.logs import Remark, say

PROTOCOLS: dict[str, Callable[[FeatureSet], ProbeResult]] = {"knn": knn_top1, "linear": linear_top1}
TITLES = {"knn": "kNN", "linear": "linear probe"}

Results = dict[str, dict[str, ProbeResult]]
"""Row of the table, then protocol, to result."""


def evaluate_features(features: FeatureSet, name: str = "encoder") -> dict[str, ProbeResult]:
    """Evaluates features by all protocols; the terminal shows them as those of `name`.

    A line says which protocol cannot be used, and why.
    """
    results = {}
    for protocol, probe in PROTOCOLS.items():
        try:
            with stage(f"{TITLES[protocol]} of the {name}"):
                results[protocol] = probe(features)
        except ValueError as error:
            say(Remark(f"no {TITLES[protocol]} of the {name}: {error}", protocol=protocol), logging.WARNING)
    return results


def print_table(results: Results, *, images: str = "the test images") -> None:
    """Prints top-1 on `images`, and the settings chosen on held-out training images."""
    table = Table(title=f"Top-1 on {images} (%)")
    table.add_column("features")
    table.add_column("kNN", justify="right")
    table.add_column("k", justify="right", style="dim")
    table.add_column("linear probe", justify="right")
    table.add_column("λ", justify="right", style="dim")
    for name, row in results.items():
        found = (row.get(protocol) for protocol in TITLES)
        cells = ((f"{one.top1:.2f}", f"{one.setting:g}") if one else ("none", "") for one in found)
        table.add_row(name, *(cell for pair in cells for cell in pair))
    Console().print(table)


def print_result(result: dict[str, Any], console: Console) -> None:
    """Prints the result as a table: percentages and what was chosen, or a row for each given setting."""
    table = Table(title=f"{result['protocol']} of {result['subject']}", title_style="")
    chosen = result["chosen"]
    shown = {name: value for name, value in result.items() if isinstance(value, float) and name != "seconds"}
    rows = result.get("by_setting", [shown | chosen])
    for name in rows[0]:
        table.add_column(name, justify="right", style="dim" if name in chosen else None)
    for row in rows:
        table.add_row(*(_cell(value, ".2f" if name in shown else ".4g") for name, value in row.items()))
    console.print(table)


def _cell(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, float) else str(value)
