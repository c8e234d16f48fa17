"""Effects between cells: what follows from the accuracies of their runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from scipy.special import stdtrit

from experiments.cells import PIXELS, Cell, Claim
from experiments.results import Results

CONFIDENCE = 0.95
"""Of the interval around an effect outside which zero has to lie for the effect to count as shown."""
NEAR = 3.0
"""Points up to which accuracies are near each other: runs that fail differ more between seeds than others."""
CLEAR_SPREADS = 3.0
"""Spreads between seeds from which a difference of two cells needs no further seeds."""


class Outcome(Enum):
    """What follows from an effect and its confidence interval."""

    SHOWN = "shown"
    NO_LOSS = "no loss"
    NOT_SHOWN = "not shown"
    REVERSED = "reversed"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim's effect as it was measured."""

    effect: float
    half_width: float
    """Of its confidence interval; NaN if a spread is not known."""
    is_clear: bool
    """Whether further seeds are not needed: zero lies outside the interval, and the effect exceeds three spreads, if it
    is a difference of two cells."""
    paper: float | None
    """The effect in the paper's numbers; None if it does not have them all."""
    outcome: Outcome
    p: tuple[float, float] | None = None
    """Of a paired comparison: by itself, and corrected for the number of the table's claims."""

    @property
    def holds(self) -> bool:
        return self.outcome in (Outcome.SHOWN, Outcome.NO_LOSS)

    @property
    def is_judged(self) -> bool:
        return self.outcome != Outcome.NOT_JUDGED


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What is known of the spread between seeds of some cells."""

    cells: tuple[str, ...]
    """Names."""
    deviation: float
    """Standard deviation of one of them; NaN if no cell has two runs."""
    freedom: int
    """Degrees of freedom."""


def verdict(claim: Claim, results: Results, everything: Sequence[Results]) -> Verdict | None:
    """The effect of a claim, and what follows from it; None while a cell has no run.

    A gain or a loss is shown if zero lies outside the effect's confidence interval, by Student's t, with Welch and
    Satterthwaite's degrees of freedom if cells have different spreads.

    Args:
        everything: the results of all tables, for the spread between seeds.
    """
    values = {name: results.values(name, claim.measure) for name in claim.weights}
    if not all(values.values()):
        return None
    effect = sum(weight * statistics.mean(values[name]) for name, weight in claim.weights.items())
    variances, clear = [], 0.0
    for spread in spreads(results, everything, claim.measure, claim.weights):
        share = sum(claim.weights[name] ** 2 / len(values[name]) for name in spread.cells)
        variances.append((share * spread.deviation**2, spread.freedom))
        clear += sum(claim.weights[name] ** 2 for name in spread.cells) * spread.deviation**2
    half_width = _half_width(variances)
    papers = [results.table.paper.get(name, {}).get(claim.measure) for name in claim.weights]
    paper = None
    if None not in papers:
        paper = sum(weight * (number or 0) for weight, number in zip(claim.weights.values(), papers, strict=True))
    return Verdict(
        effect=effect,
        half_width=half_width,
        is_clear=abs(effect) > half_width and abs(effect) >= CLEAR_SPREADS * math.sqrt(clear / 2),  # not if NaN
        paper=paper,
        outcome=_outcome(effect, half_width, claim),
    )


def _half_width(variances: Sequence[tuple[float, int]]) -> float:
    """Of the interval around a sum of independent parts, from each one's variance and degrees of freedom."""
    if not all(freedom for _, freedom in variances):
        return math.nan
    total = sum(variance for variance, _ in variances)
    if not total:
        return 0.0
    freedom = total**2 / sum(variance**2 / freedom for variance, freedom in variances)
    return math.sqrt(total) * float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _outcome(effect: float, half_width: float, claim: Claim) -> Outcome:
    if math.isnan(half_width):
        return Outcome.NOT_JUDGED
    if effect > half_width:
        return Outcome.SHOWN
    if claim.not_below and effect - half_width > -claim.margin:
        return Outcome.NO_LOSS
    return Outcome.REVERSED if effect < -half_width else Outcome.NOT_SHOWN


def unclear_cells(results: Results, everything: Sequence[Results]) -> set[str]:
    """Names of the cells whose claims cannot be judged without further seeds; all cells if the table claims nothing.

    Raw pixels, which no seed changes, are not among them.
    """
    if not results.table.claims:
        return {cell.name for cell in results.table.cells}
    unclear: set[str] = set()
    for claim in results.table.claims:
        found = verdict(claim, results, everything)
        if found is None or not found.is_clear:
            unclear |= claim.weights.keys()
    return unclear - {cell.name for cell in results.table.cells if cell.method == PIXELS}


def spreads(results: Results, everything: Sequence[Results], measure: str, cells: Collection[str]) -> list[Spread]:
    """The named cells in groups of accuracies near each other, each with its spread between seeds.

    A group's spread is pooled over its cells and over trials, whose cells have many seeds, of a near accuracy and of
    about its length on its images, with its encoder. Raw pixels, which no seed changes, are in no group.
    """
    compared = {cell.name: cell for cell in results.table.cells if cell.name in cells and cell.method != PIXELS}
    means = {name: statistics.mean(results.values(name, measure)) for name in compared}
    found = []
    for group in _near_each_other(means):
        pool = {results.first_id(name): results.values(name, measure) for name in group}
        for trials in (each for each in everything if each.table.gives_spread):
            for trial in trials.table.cells:
                values = trials.values(trial.name, measure)
                if (
                    values
                    and means[group[0]] - NEAR <= statistics.mean(values) <= means[group[-1]] + NEAR
                    and all(_are_alike(compared[name], trial) for name in group)
                ):
                    pool[trials.first_id(trial.name)] = values  # once, if it is one of the cells compared
        deviation, freedom = pooled(pool.values())
        found.append(Spread(cells=tuple(group), deviation=deviation, freedom=freedom))
    return found


def _near_each_other(means: Mapping[str, float]) -> Iterator[list[str]]:
    """Names in groups, by rising means, each of which is near the one before it."""
    group: list[str] = []
    for name in sorted(means, key=lambda name: means[name]):
        if group and means[name] - means[group[-1]] > NEAR:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def _are_alike(one: Cell, other: Cell) -> bool:
    """Whether two cells train the same encoder on as many images of the same data set, and see at most twice as many
    as each other."""
    first, second = one.config(0), other.config(0)
    ratio = (first.optimization.epochs * first.views.views) / (second.optimization.epochs * second.views.views)
    images = [(each.data.dataset, each.data.data_dir, each.data.num_images) for each in (first, second)]
    return first.model.encoder == second.model.encoder and images[0] == images[1] and 0.5 <= ratio <= 2


def pooled(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation within groups, and its degrees of freedom; NaN and 0 if no group has two values."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    if not freedom:
        return math.nan, 0
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
    return math.sqrt(squares / freedom), freedom
