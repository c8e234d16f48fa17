"""Effects between cells whose runs share their seeds, with a correction for their number."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Effect:
    """The mean of paired differences."""

    mean: float
    half_width: float
    """Of its 95 % interval, by Student's t."""
    p: float
    """Of the two-sided paired t-test, not corrected."""


def paired_effect(better: Sequence[float], worse: Sequence[float]) -> Effect:
    """The effect of one cell over another; both have the same seeds in the same order.

    Raises:
        ValueError: other numbers of runs, or fewer than two.
    """
    differences = [one - other for one, other in zip(better, worse, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"{len(differences)} pairs of runs tell no spread: give at least 2")
    mean, freedom = statistics.fmean(differences), len(differences) - 1
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half_width = error * float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
    if error == 0:
        return Effect(mean, half_width, 0.0 if mean else 1.0)
    return Effect(mean, half_width, 2 * float(stdtr(freedom, -abs(mean) / error)))


def holm(p: Sequence[float]) -> list[float]:
    """The p-values corrected for their number by Holm (1979), in their order."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = largest
    return corrected
