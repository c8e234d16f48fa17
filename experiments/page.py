"""Writes docs/results.md and its plots from the tables and what their cells have measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.cells import LOSS, PIC, Cell, Claim, Table
from experiments.data import num_images
from experiments.effects import CLEAR_SPREADS, CONFIDENCE, NEAR, Outcome, Verdict, verdict
from experiments.paired import paired_verdicts
from experiments.plots import ON_DARK, draw
from experiments.results import STEPS_SECONDS, Results, load
from experiments.runner import MOST_SEEDS, plan
from experiments.tables.cifar import METHODS
from experiments.tables.common import BASE, WINDOW
from experiments.tables.gpu import GPU
from trainer.presets import PRESETS
from trainer.proportions import MEANINGS, proportions
from weightserver.common.atomic_files import atomic_write

PAGE, PICTURES = "results.md", "images/tables"
_PAPER_IMAGES = 1_281_167
"""Training images of ImageNet-1K."""
_HEAD = """\
<!-- Written by python -m experiments page: change experiments/ instead. -->

# Results

The paper's tables, repeated on Fashion-MNIST with the preset's small encoder. On characters in colour only the
correction, the window, the number of negatives and the other methods are compared. Numbers are top-1 accuracies in
percent on the test images (10,000 of Fashion-MNIST), mean ± standard deviation over seeds: of a linear probe (linear)
and of nearest neighbours (kNN) in the features of the images that the encoder was trained on; loss is that of the last
batch. The paper's numbers are of ResNet-50, and unless a table says otherwise its linear accuracies on ImageNet:
effects can be compared, levels cannot.

    make tables # runs what has not finished, one process a core, and writes this page
    make tables TABLES_FLAGS="--tables negatives,lengths --seeds 1"   # a part of it
    make tables-quick   # the same for tiny cells, in ten minutes: shows that everything works

Each cell is a run's directory in runs/tables, with its settings, records and encoder; what the cells measured is in
[experiments/results](../experiments/results). A repeated command resumes what was interrupted.

**On natural images** nothing was run yet. [experiments/PLAN.md](../experiments/PLAN.md) says beforehand what will be,
at the paper's proportions and with a correction for the number of effects; what follows is on 28-pixel grey images.

**What corresponds to what.** Runs of different sizes are compared by dimensionless numbers, which
`trainer.proportions` computes for any run (in its summary, its report, and by `--print-config`).

A row w of length r whose own image has the embedding z gets the gradient −(1 − p) (ẑ − (ŵ·ẑ) ŵ) / (τ B r) of Equation
(1), for p its probability. It is orthogonal to w, because the loss depends on w's direction alone, and at most
1/(τ B r) long. SGD with momentum m moves w by η/(1 − m) times that over the following steps, so that a visit turns w by
at most arctan(a/r²), with a = η/((1 − m) τ B). At first r² = D σ². The other rows' images push w in the same way; their
probabilities add up to about as much, in many directions.

Being orthogonal, each visit makes r² larger by (a/r)². Weight decay makes it smaller by the factor
exp(−2 λ η/(1 − m)) in each step: momentum multiplies it as it does η. Rows therefore approach an equilibrium,
r⁴ = a² (1 − m) B / (2 λ η N), at which each visit turns them by √(2 λ η N / ((1 − m) B)), whatever σ, τ and D are.
The paper's rows begin near theirs, with 0.55 rad a visit at the highest η, and turn by 65 rad in 200 visits; dense SGD
with gradients of that length gives the same to five percent. (Without the 1/(1 − m) of weight decay it would be 22.)
What a longer σ does is to delay that equilibrium: with σ = 0.1 our rows on Fashion-MNIST turn by 12 rad in all.

If c multiplies the rows' η and σ², and 1/c their λ, nothing changes. So the numbers of rows are the first turn, λ·Ση
and the visits; the total turn follows from them. What the correction is worth depends on λ·Ση, not on λ.

"""
_RULE = f"""\

**How effects are judged.** An effect is a weighted sum of means, ± half of its {100 * CONFIDENCE:.0f} % confidence
interval, by Student's t (Welch's where spreads differ). It shows if zero lies outside the interval; "reproduces" is
said of the paper's gains only. Where nothing is to be lost, a comparison holds within x points if the interval lies
above −x, and is undecided if it reaches lower but has zero in it. The spread between seeds is pooled over the compared
cells whose accuracies are at most {NEAR:g} points apart and, if they train the trials' encoder on the trials' images
for about as long (half to twice as many images seen), over the trials, five seeds each of two runs. Cells further off,
such as runs that collapse, have a spread of their own, which one seed does not tell. One seed is enough where all
effects that compare a cell show and exceed {CLEAR_SPREADS:g} times the spread; other cells get up to three. A mean
without ± is of one seed. Where an effect does not hold and nothing more is said, only further seeds were tried.

On CIFAR-10 the plan was written beforehand: an effect is the mean of five differences of runs with the same seed. It is
judged once all five have run, and shows if its p by the paired t-test, corrected by Holm within the table, is below
{1 - CONFIDENCE:.2f}.
"""
_GAINS = {
    Outcome.SHOWN: "shows",
    Outcome.NOT_SHOWN: "does not show beyond the spread",
    Outcome.REVERSED: "is reversed",
}
_LOSSES = {Outcome.NOT_SHOWN: "is undecided", Outcome.REVERSED: "a loss shows"}
_OF_THE_PAPER, _NO_LOSS, _OTHER = _KINDS = ("the paper's gains", "nothing lost", "other effects")


def write(tables: Sequence[Table], results: Path, docs: Path) -> None:
    """Writes the page, and a plot of each table that has results; raises ValueError if none has."""
    everything = [load(results / f"{table.name}.json", table) for table in tables]
    if not any(map(_has_runs, everything)):
        cells = "python -m experiments run, with the same options"
        raise ValueError(f"{results} has no results of these tables: first run their cells ({cells})")
    pictures = docs / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    text = text_of(everything)
    atomic_write(docs / PAGE, lambda path: path.write_text(text))
    for found in everything:
        if _has_runs(found):
            draw(found, pictures / f"{found.table.name}.svg")
            if found.table.over_time:  # the front page's figure
                draw(found, pictures / f"{found.table.name}-dark.svg", text_colour=ON_DARK)


def text_of(everything: Sequence[Results]) -> str:
    """The page in Markdown."""
    parts = [_HEAD, *_proportions(), _RULE, *_summary(everything)]
    for results in everything:
        if _has_runs(results) or results.table is GPU:
            parts.append("\n" + "\n".join(_section(results, everything)) + "\n")
    if missing := [r.table for r in everything if not _has_runs(r) and r.table is not GPU]:
        parts.append("\n## Not run yet\n\n" + "".join(f"- {_titled(table)}\n" for table in missing))
    return "".join(parts) + "\n" + "\n".join(_hours(everything)) + "\n"


def _has_runs(results: Results) -> bool:
    return any(results.runs.values())


def _titled(table: Table) -> str:
    return (
        f"{table.title} ({table.source} of the paper)" if table.source.startswith(("Table", "Figure")) else table.title
    )


def _proportions() -> Iterator[str]:
    """The table of dimensionless numbers, of the paper's default run and ours."""
    _, paper = PRESETS["imagenet-1k"]
    fashion = Cell(row="", settings=BASE | WINDOW).config(0)
    cifar = next(cell for cell in METHODS.cells if cell.method == PIC).config(0)
    on_gpu = GPU.cells[0].config(0)
    runs = [(paper, _PAPER_IMAGES), *((config, num_images(config)) for config in (cifar, on_gpu, fashion))]
    columns = [asdict(proportions(config, number)) for config, number in runs]
    yield "| | the paper, 200 epochs | CIFAR-10 | CIFAR-10 on a GPU | Fashion-MNIST |\n|---|---|---|---|---|\n"
    for name, meaning in MEANINGS.items():
        yield f"| {meaning} | {' | '.join(f'{column[name]:.3g}' for column in columns)} |\n"


def _summary(everything: Sequence[Results]) -> Iterator[str]:
    """A line for each table with effects: how many of each kind hold, and how many cannot be judged yet."""
    lines, num_judged, counted = [], 0, set[tuple[Hashable, ...]]()
    for results in everything:
        judged = []
        for claim, found in _verdicts(results, everything):
            if found is not None and (what := _compared(claim, results)) not in counted:
                counted.add(what)
                judged.append((claim, found))
        counts = [_count(found for claim, found in judged if _kind(claim, found) == kind) for kind in _KINDS]
        unjudged = sum(not found.is_judged for _, found in judged)
        num_judged += len(judged) - unjudged
        if judged:
            lines.append(f"| {_titled(results.table)} | {' | '.join(counts)} | {unjudged or ''} |\n")
    if lines:
        yield f"\n| how many hold | {' | '.join(_KINDS)} | not judged |\n|---|{'---|' * len(_KINDS)}---|\n"
        yield from lines
        yield (
            f"\n{num_judged} effects are judged, each by itself, and counted in the first table that has "
            f"it. Of those that do not\nexist, one in {1 / (1 - CONFIDENCE):.0f} shows by chance, or more, since seeds "
            "are added where an effect is unclear. Comparisons\nwith the same cell are not independent of each other; "
            "one that is asked both as a gain and as no loss counts twice.\n"
        )
    if num_planned := len(plan(everything, MOST_SEEDS)):
        yield f"\n{num_planned} runs are still planned, most of them seeds of cells whose effects are unclear.\n"


def _compared(claim: Claim, results: Results) -> tuple[Hashable, ...]:
    """What is compared; equal for the same comparison in several tables."""
    weights = frozenset((results.first_id(name), weight) for name, weight in claim.weights.items())
    return weights, claim.measure, claim.not_below


def _kind(claim: Claim, found: Verdict) -> str:
    if claim.not_below:
        return _NO_LOSS
    return _OTHER if found.paper is None else _OF_THE_PAPER


def _count(verdicts: Iterable[Verdict]) -> str:
    holding = [found.holds for found in verdicts if found.is_judged]
    return f"{sum(holding)} of {len(holding)}" if holding else ""


def _verdicts(results: Results, everything: Sequence[Results]) -> list[tuple[Claim, Verdict | None]]:
    if results.table.is_paired:
        return list(zip(results.table.claims, paired_verdicts(results), strict=True))
    return [(claim, verdict(claim, results, everything)) for claim in results.table.claims]


def _section(results: Results, everything: Sequence[Results]) -> Iterator[str]:
    table = results.table
    yield f"## {_titled(table)}\n"
    if table.text:
        yield f"{table.text}\n"
    yield from _grid(results) if table.is_grid else _rows(results)
    yield ""
    told: set[str] = set()
    for claim, found in _verdicts(results, everything):
        outcome = "not run yet" if found is None else _said(claim, found)
        tried = claim.tried if found is not None and not found.holds and claim.tried not in told else ""
        told.add(tried)
        yield f"- {_capitalised(claim.text)}: {outcome}{tried and '. ' + tried}"
    if table.claims:
        yield ""
    if _has_runs(results):
        yield f"![{table.title}]({PICTURES}/{table.name}.svg)"
    else:
        yield "None of them has run yet."


def _capitalised(text: str) -> str:
    """A sentence's beginning; symbols such as τ stay as they are."""
    return text[0].upper() + text[1:] if text[0].isascii() else text


def _said(claim: Claim, found: Verdict) -> str:
    digits = _digits(claim.measure)
    width = "" if math.isnan(found.half_width) else f" ± {found.half_width:.{digits}f}"
    paper = "" if found.paper is None else f" (the paper {found.paper:+.{digits}f})"
    p = "" if found.p is None else ", p = {:.2g}, corrected {:.2g}".format(*found.p)
    return f"**{_word(claim, found)}**, {found.effect:+.{digits}f}{width}{paper}".replace("-", "−") + p


def _word(claim: Claim, found: Verdict) -> str:
    kind = _kind(claim, found)
    if found.outcome is Outcome.NOT_JUDGED:
        return "is not judged, as the spread is not known"
    if kind == _NO_LOSS:
        return f"holds within {claim.margin:g}" if found.holds else _LOSSES[found.outcome]
    return "reproduces" if found.holds and kind == _OF_THE_PAPER else _GAINS[found.outcome]


def _grid(results: Results) -> Iterator[str]:
    """One line for each row and measure, and for the paper's numbers; one column for each column of cells."""
    table = results.table
    columns, rows = (
        list(dict.fromkeys(names)) for names in zip(*((c.column, c.row) for c in table.cells), strict=True)
    )
    cells = {(cell.row, cell.column): cell.name for cell in table.cells}
    yield f"| | | {' | '.join(columns)} |"
    yield "|---|---|" + "---|" * len(columns)
    for row in rows:
        names = [cells.get((row, column)) for column in columns]
        for number, (measure, heading) in enumerate(table.measures.items()):
            values = [shown(results, name, measure) if name else "" for name in names]
            yield f"| {row if number == 0 else ''} | {heading} | {' | '.join(values)} |"
        for measure, heading in _papers_measures(table).items():
            numbers = [table.paper.get(name or "", {}).get(measure) for name in names]
            if any(numbers):
                yield f"| | {heading} | {' | '.join(map(_quoted, numbers))} |"


def _rows(results: Results) -> Iterator[str]:
    """One line for each cell, one column for each measure and for the paper's."""
    table, papers = results.table, _papers_measures(results.table)
    yield f"| | {' | '.join([*table.measures.values(), 'seeds', *papers.values()])} |"
    yield "|---|" + "---|" * (len(table.measures) + 1 + len(papers))
    for cell in table.cells:
        values = [shown(results, cell.name, measure) for measure in table.measures]
        numbers = [table.paper.get(cell.name, {}).get(measure) for measure in papers]
        seeds = str(len(results.runs.get(cell.name, {})))
        yield f"| {' | '.join([cell.name, *values, seeds, *map(_quoted, numbers)])} |"


def _quoted(number: float | None) -> str:
    """The paper's number, with at least one decimal; empty without one."""
    return "" if number is None else f"{number:.1f}" if number == round(number, 1) else f"{number:g}"


def _papers_measures(table: Table) -> dict[str, str]:
    """Measures of which the paper has numbers, with headings."""
    found = [measure for measure in table.measures if any(measure in numbers for numbers in table.paper.values())]
    return {measure: "paper" if len(found) == 1 else f"paper, {table.measures[measure]}" for measure in found}


def shown(results: Results, cell: str, measure: str) -> str:
    """Mean ± standard deviation, or the seconds of the run that is drawn over time; a dash without runs."""
    values, digits = results.values(cell, measure), _digits(measure)
    if measure == STEPS_SECONDS:
        values = values[:1]  # other seeds may have run on other processors
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def _digits(measure: str) -> int:
    """Digits after the point."""
    return 2 if measure == LOSS else 1


def _hours(everything: Sequence[Results]) -> Iterator[str]:
    """The time that all runs took."""
    runs = {run["id"]: run for results in everything for found in results.runs.values() for run in found.values()}
    hours = sum(run["core_seconds"] for run in runs.values()) / 3600
    processors = sorted({run.get("processor", "") for run in runs.values()} - {""})
    yield "## Time\n"
    on = f" ({', '.join(processors)})" if processors else ""
    yield f"{len(runs)} runs took at least {hours:.1f} hours of one core{on}, evaluations included."
