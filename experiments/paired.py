"""Effects between cells whose runs share their seeds, with a correction for their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import ttest_rel

from experiments.cells import Table
from experiments.results import Runs, values

CONFIDENCE = 0.95
"""Confidence of the interval around an effect."""


@dataclass(frozen=True)
class Effect:
    """The mean of paired differences."""

    mean: float
    half_width: float
    """Half the width of its confidence interval, by Student's t."""
    p: float
    """The p of the two-sided paired t-test."""
    corrected: float = 1.0
    """This p, corrected for the number of the table's claims."""

    @property
    def shows(self) -> bool:
        return self.corrected < 1 - CONFIDENCE

    @property
    def gains(self) -> bool:
        return self.shows and self.mean > 0


def paired_effect(better: Sequence[float], worse: Sequence[float]) -> Effect:
    """The effect of one cell over another; both have the same seeds in the same order.

    Raises:
        ValueError: other numbers of runs, or fewer than two.
    """
    if len(better) < 2:
        raise ValueError(f"{len(better)} pairs of runs tell no spread: give at least 2")
    found = ttest_rel(better, worse)
    low, high = found.confidence_interval(CONFIDENCE)
    p = float(found.pvalue)  # not a number if all pairs are equal
    return Effect(float(low + high) / 2, float(high - low) / 2, 1.0 if math.isnan(p) else p)


def holm(p: Sequence[float]) -> list[float]:
    """The p-values corrected for their number by Holm (1979), in their order."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = largest
    return corrected


def effects(table: Table, runs: Runs) -> list[Effect | None]:
    """The effect of each of a table's claims; None while runs of it are missing.

    Those count in the correction as effects that do not exist.
    """
    cells = {cell.name: cell for cell in table.cells}
    found: list[Effect | None] = []
    for claim in table.claims:
        measured = [values(runs, cells[name], claim.measure) for name in claim.names]
        seeds = sorted(set.intersection(*map(set, measured)))
        if table.seeds > 1:
            seeds = [seed for seed in seeds if seed < table.seeds]  # those of the plan, and no further ones
        better, worse, *others = ([of[seed] for seed in seeds] for of in measured)
        if others:
            worse = [low + more - less for low, more, less in zip(worse, *others, strict=True)]
        found.append(paired_effect(better, worse) if len(seeds) >= max(2, table.seeds) else None)
    corrected = holm([1.0 if effect is None else effect.p for effect in found])
    return [
        None if effect is None else Effect(effect.mean, effect.half_width, effect.p, p)
        for effect, p in zip(found, corrected, strict=True)
    ]
