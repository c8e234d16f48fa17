"""Effects between cells whose runs share their seeds, with a correction for their number."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

from experiments.cells import Claim
from experiments.effects import CONFIDENCE, Outcome, Verdict
from experiments.results import Results


@dataclass(frozen=True)
class Effect:
    """The mean of paired differences."""

    mean: float
    half_width: float
    """Of its confidence interval, by Student's t."""
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


def paired_verdicts(results: Results) -> list[Verdict | None]:
    """What follows from each claim of a table whose claims compare two cells; None while one of its seeds is missing.

    Claims that are missing count in the correction as effects that do not exist.
    """
    effects = [_effect(claim, results) for claim in results.table.claims]
    corrected = holm([1.0 if effect is None else effect.p for effect in effects])
    return [
        None
        if effect is None
        else Verdict(
            effect=effect.mean,
            half_width=effect.half_width,
            is_clear=True,
            paper=None,
            outcome=_outcome(effect.mean, p),
            p=(effect.p, p),
        )
        for effect, p in zip(effects, corrected, strict=True)
    ]


def _effect(claim: Claim, results: Results) -> Effect | None:
    (better,) = (name for name, weight in claim.weights.items() if weight == 1)
    (worse,) = (name for name, weight in claim.weights.items() if weight == -1)
    seeds = range(results.table.seeds)
    values = {name: results.runs.get(name, {}) for name in (better, worse)}
    if not all(seed in runs for runs in values.values() for seed in seeds):
        return None
    of_better, of_worse = ([float(runs[seed]["measures"][claim.measure]) for seed in seeds] for runs in values.values())
    return paired_effect(of_better, of_worse)


def _outcome(mean: float, corrected: float) -> Outcome:
    if corrected >= 1 - CONFIDENCE:
        return Outcome.NOT_SHOWN
    return Outcome.SHOWN if mean > 0 else Outcome.REVERSED
