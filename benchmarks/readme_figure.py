"""Draws the README's figure from the results of benchmarks.scale, for light and for dark pages.

python -m benchmarks.readme_figure
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
_TOP, _BOTTOM, _WIDTH = 70, 210, 300
"""Of a panel, in pixels."""
_EXPONENTS = range(6, 10)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"


class Colours(NamedTuple):
    """The colours of one kind of page."""

    text: str
    quiet: str
    ours: str
    dense: str


class Panel(NamedTuple):
    """One quantity over the number of rows N."""

    title: str
    left: int
    largest: float
    unit: str
    ours: list[tuple[int, float]]
    """(N, value)."""
    dense: float
    """At N = 10⁶."""


THEMES = {
    "results.svg": Colours("#1f2328", "#59636e", "#0969da", "#bc4c00"),
    "results-dark.svg": Colours("#f0f6fc", "#9198a1", "#4493f8", "#db6d28"),
}


def panels(results: dict[str, list[dict[str, Any]]]) -> list[Panel]:
    """The panels that show the results of benchmarks.scale."""
    ours, dense = results["resident, fresh table"], results["dense"][0]
    times = [(measured["rows"], 1000 * measured["step"]["p50"]) for measured in ours]
    memory = [(measured["rows"], measured["trainer_bytes"] / 2**30) for measured in ours]
    return [
        Panel("Time of a training step", 50, 1500, "ms", times, 1000 * dense["step"]["p50"]),
        Panel("Trainer's peak memory", 480, 4, "GiB", memory, dense["trainer_bytes"] / 2**30),
    ]


def drawn(panel: Panel, colours: Colours) -> list[str]:
    """The panel as SVG elements."""

    def x(rows: int) -> float:
        return panel.left + _WIDTH * (math.log10(rows) - _EXPONENTS[0]) / (len(_EXPONENTS) - 1)

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * value / panel.largest

    def number(value: float) -> str:
        return f"{value:,.0f} {panel.unit}" if value >= 10 else f"{value:.1f} {panel.unit}"

    def text(at: float, height: float, content: str, colour: str, *, size: int = 13, anchor: str = "middle") -> str:
        return (
            f'<text x="{at:.0f}" y="{height:.0f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
            f"{content}</text>"
        )

    line = " ".join(f"{x(rows):.1f},{y(value):.1f}" for rows, value in panel.ours)
    elements = [
        text(panel.left, 30, panel.title, colours.text, size=15, anchor="start"),
        f'<path d="M{panel.left} {_BOTTOM}h{_WIDTH}" stroke="{colours.quiet}"/>',
        f'<polyline points="{line}" fill="none" stroke="{colours.ours}" stroke-width="2.5"/>',
        f'<circle cx="{x(10**6):.1f}" cy="{y(panel.dense):.1f}" r="5" fill="{colours.dense}"/>',
        text(
            x(10**6) + 12,
            y(panel.dense) + 5,
            f"{number(panel.dense)}: all rows in memory",
            colours.dense,
            anchor="start",
        ),
        text(x(10**9), y(panel.ours[-1][1]) - 12, number(panel.ours[-1][1]), colours.ours),
    ]
    elements += [
        f'<circle cx="{x(n):.1f}" cy="{y(value):.1f}" r="4" fill="{colours.ours}"/>' for n, value in panel.ours
    ]
    for exponent in _EXPONENTS:
        elements.append(text(x(10**exponent), _BOTTOM + 20, f"10{_SUPERSCRIPTS[exponent]}", colours.quiet))
    return [*elements, text(panel.left + _WIDTH / 2, _BOTTOM + 42, "images N = rows of the classifier", colours.quiet)]


def figure(results: dict[str, list[dict[str, Any]]], colours: Colours) -> str:
    """The figure as SVG."""
    label = "Step time and trainer memory stay the same from a million to a billion images"
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 265" font-family="system-ui, sans-serif" '
            f'role="img" aria-label="{label}">',
            *(element for panel in panels(results) for element in drawn(panel, colours)),
            "</svg>\n",
        ]
    )


def figures() -> dict[str, str]:
    """The content of each file in docs/images."""
    results = json.loads((ROOT / "benchmarks/results/scale.json").read_text())["results"]
    return {name: figure(results, colours) for name, colours in THEMES.items()}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, content in figures().items():
        (ROOT / "docs/images" / name).write_text(content)
