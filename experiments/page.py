"""Writes docs/results.md, its appendix and their plots from the tables and what their cells have measured."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from scipy.stats import t as students_t

from experiments import million
from experiments.cells import LOSS, PIC, Cell, Claim, Table
from experiments.claims import IMAGENET_1K, alike, claim_table, outcome
from experiments.paired import CONFIDENCE, Effect, effects
from experiments.plots import curves, draw, draw_curves
from experiments.results import Runs, load, seeds_of, values
from experiments.tables.cifar import BEYOND, METHODS, SEEDS, TRIALS
from experiments.tables.fashion import BASE, FASHION_MNIST, WINDOW
from experiments.tables.fashion import BEYOND as BEYOND_ON_FASHION_MNIST
from experiments.tables.gpu import GPU
from trainer.presets import PRESETS
from trainer.proportions import MEANINGS, proportions
from weightserver.common.atomic_files import atomic_write

PAGE, APPENDIX, PICTURES = "results.md", "results-fashion-mnist.md", "images/tables"
METHODS_PICTURE = "images/methods.svg"
MILLION_PICTURE = "images/million.svg"
_APPENDIX = {table.name for table in FASHION_MNIST}
_FEW_CLAIMS = 10
"""Number of claims of a table of middling length, as an example."""
_GENERATED = "<!-- Written by python -m experiments page: change experiments/ instead. -->\n"
_HEAD = f"""\
{_GENERATED}
# Results

The paper's tables on CIFAR-10 at most of the paper's proportions, by [a plan](../experiments/PLAN.md) that was written
before the first run and dates its changes. Unless a table says otherwise, runs train ResNet-18's shape, at a quarter of
its width and with one block a stage, on the first 1,000 training images. Numbers are top-1 accuracies in percent on the
test images, mean ± standard deviation over seeds: of a linear probe (linear), whose λ is the best of 0.01, 0.001,
0.0001 and 0.00001 by cross-validation in five folds, and of 20 nearest neighbours (kNN), both with the labels of all
50,000 training images; loss is that of the last batch. The paper's numbers are of ResNet-50, and unless a table says
otherwise its linear accuracies on ImageNet: effects can be compared, levels cannot. The images may be copies as JPEGs
(quality about 75).
"""
_DERIVATION = """
## What corresponds to what

Runs of different sizes are compared by dimensionless numbers, which `trainer.proportions` computes for any run (in its
summary, its report, and by `--print-config`). A factor stands where one is not within 5 % of the paper's.

{numbers}
A row w of length r whose own image has the embedding z gets the gradient −(1 − p) (ẑ − (ŵ·ẑ) ŵ) / (τ B r) of Equation
(1), for p its probability. It is orthogonal to w, because the loss depends on w's direction alone, and at most
1/(τ B r) long. SGD with momentum m moves w by η/(1 − m) times that over the following steps, so that a visit turns w by
at most arctan(a/r²), with a = η/((1 − m) τ B). At first r² = D σ². The other rows' images push w in the same way; their
probabilities add up to about as much, in many directions.

Being orthogonal, each visit makes r² larger by (a/r)². Weight decay makes it smaller by the factor
exp(−2 λ η/(1 − m)) in each step: momentum multiplies it as it does η. Rows therefore approach an equilibrium,
r⁴ = a² (1 − m) B / (2 λ η N), at which each visit turns them by √(2 λ η N / ((1 − m) B)), whatever σ, τ and D are.
The paper's rows begin near theirs, with 0.55 rad a visit at the highest η, and turn by 65 rad in 200 visits; dense SGD
with gradients of that length gives the same to five percent. (Without the 1/(1 − m) of weight decay it would be 21.5.)
What a longer σ does is to delay that equilibrium: with σ = 0.1 our rows on Fashion-MNIST turn by 12 rad in all.

If c multiplies the rows' η and σ², and 1/c their λ, nothing changes. So the numbers of rows are the first turn, λ·Ση
and the visits; the total turn follows from them. What decay does to idle rows depends on λ·Ση, not on λ. Rows without
momentum and with 1/(1 − m) times the rate move as far, so η·N/B and λ·Ση are given as for m = 0.9. η·N/B does change
with c: it compares runs whose encoder has the rows' η, as the paper's does.

{encoder}

{momentum}
"""
_APPENDIX_HEAD = f"""\
{_GENERATED}
# Results on Fashion-MNIST

The appendix of [the results on CIFAR-10](results.md), which says how effects are judged. These tables were run before
[the plan](../experiments/PLAN.md), but for the last. Runs have the preset's small encoder on 10,000 images, with these
images' labels for the probes, unless a table says otherwise, and are further from the paper's proportions. Seeds were
added where an effect was unclear, and λ was chosen by the test images: read p-values as too small. The probe chooses
its own λ on 1,000 images, by which chance may choose a worse one. Most effects have two or three pairs of runs, which
tell little of their spread.
"""
_RUNS = """
## Runs

    make tables # runs what has not finished, one process a core, and writes this page
    make tables TABLES_FLAGS="--tables negatives,lengths --seeds 1"   # a part of it
    make tables-quick   # the same for tiny cells, in ten minutes: shows that everything works

Each run is a directory in runs/tables, with its settings, records and encoder; what the runs measured is in
[experiments/results](../experiments/results). A repeated command resumes what was interrupted.
"""


def write(tables: Sequence[Table], results: Path, docs: Path) -> None:
    """Writes the page, its appendix, the plots of `drawn_tables`, and that of methods over time, for README.md.

    Raises:
        ValueError: no table has results.
    """
    runs = load(results)
    if not any(_has_runs(table, runs) for table in tables):
        cells = "python -m experiments run, with the same options"
        raise ValueError(f"{results} has no results of these tables: first run their cells ({cells})")
    pictures = docs / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    end_to_end = million.section(results / million.RESULTS.name, docs / MILLION_PICTURE, MILLION_PICTURE)
    text, appendix = text_of(tables, runs, end_to_end), appendix_of(tables, runs)
    atomic_write(docs / PAGE, lambda path: path.write_text(text))
    atomic_write(docs / APPENDIX, lambda path: path.write_text(appendix))
    for table in drawn_tables(tables, runs):
        draw(table, runs, pictures / f"{table.name}.svg")
        if table.name == METHODS.name and (found := curves(table, runs)):
            draw_curves(found, docs / METHODS_PICTURE)


def drawn_tables(tables: Sequence[Table], runs: Runs) -> list[Table]:
    """The tables of the plan that have results."""
    return [table for table in tables if table.name not in _APPENDIX and _has_runs(table, runs)]


def text_of(tables: Sequence[Table], runs: Runs, end_to_end: Iterable[str] = ()) -> str:
    """The page in Markdown; `end_to_end` are the lines of a section that is no table's."""
    planned = [table for table in tables if table.name not in _APPENDIX]
    planned.sort(key=lambda table: table.name == TRIALS.name)  # rates that were tried come last
    parts = [_HEAD, *_claims(planned, runs)]
    for table in planned:
        if _has_runs(table, runs) or table.name == GPU.name:
            parts.append(_section(table, runs))
        if table.name == BEYOND.name:
            parts += _gains_on_both(runs)
    parts += [f"\n{line}" for line in end_to_end]
    if missing := [table for table in planned if not _has_runs(table, runs) and table.name != GPU.name]:
        parts.append("\n## Not run yet\n\n" + "".join(f"- {_titled(table)}\n" for table in missing))
    return "".join([*parts, _derivation(), *_of_appendix(tables, runs), _RUNS, _hours(tables, runs)])


def appendix_of(tables: Sequence[Table], runs: Runs) -> str:
    """The page of Fashion-MNIST in Markdown."""
    there = [table for table in tables if table.name in _APPENDIX and _has_runs(table, runs)]
    return "".join([_APPENDIX_HEAD, *(_section(table, runs) for table in there)])


def _has_runs(table: Table, runs: Runs) -> bool:
    return any(seeds_of(runs, cell) for cell in table.cells)


def _titled(table: Table) -> str:
    return f"{table.title} ({table.source} of the paper)" if table.source.startswith("Table") else table.title


def _claims(tables: Sequence[Table], runs: Runs) -> Iterator[str]:
    """What the paper says, what shows here, and how that is judged."""
    yield "\n## What the paper says, and what shows here\n"
    if lines := list(claim_table(tables, runs)):
        yield "\n" + "\n".join(lines) + "\n"
    least = students_t.ppf(1 - (1 - CONFIDENCE) / 2 / _FEW_CLAIMS, SEEDS - 1) / math.sqrt(SEEDS)
    rule = (
        f"An effect is the mean of the differences of runs with the same seed, ± half of its {100 * CONFIDENCE:.0f} % "
        "confidence interval, once the seeds of its table have run. It **shows** if its p by the paired t-test, "
        f"corrected by Holm for the number of the table's effects, is below {1 - CONFIDENCE:.2f}; intervals are not "
        'corrected. "Does not show" is not "no effect": the interval says which effects are possible. With '
        f"{SEEDS} pairs and {_FEW_CLAIMS} effects in a table, the clearest shows only from {least:.1f} standard "
        "deviations of its differences. Intervals hold for one fixed set of training images: seeds change initial "
        "weights, order and views, not the images."
    )
    yield f"\n{_wrapped(rule)}\n"


def _derivation() -> str:
    """The dimensionless numbers: of the paper's default run and ours, where they come from, and what they mean."""
    _, paper = PRESETS["imagenet-1k"]
    fashion = Cell(name="", settings=BASE | WINDOW)
    cifar = next(cell for cell in METHODS.cells if cell.method == PIC)
    ours = [(cell.config(0), cell.num_images) for cell in (cifar, GPU.cells[0], fashion)]
    papers, *others = [asdict(proportions(config, number)) for config, number in [(paper, IMAGENET_1K), *ours]]
    lines = ["| | the paper, 200 epochs | CIFAR-10 | CIFAR-10 on a GPU | Fashion-MNIST |", "|---|---|---|---|---|"]
    for name, meaning in MEANINGS.items():
        columns = [f"{papers[name]:.3g}", *(_beside(other[name], papers[name]) for other in others)]
        lines.append(f"| {meaning} | {' | '.join(columns)} |")
    kept = [
        (numbers["negatives_of_batch"], 1 - paper.optimization.momentum ** numbers["negatives_of_batch"])
        for numbers in (papers, others[0])
    ]
    (all_classes, all_kept), (few_classes, few_kept) = kept
    momentum = (
        "Momentum carries a row on after a visit, for as long as it is active: in epoch order for K/B steps, in which "
        f"it moves by 1 − m^(K/B) of the way. With the paper's K/B of {all_classes:.0f} that is {100 * all_kept:.0f} "
        f"%, with the {few_classes:.2g} on CIFAR-10 {100 * few_kept:.0f} %; without correction the rest waits, and "
        "moves it at its next visits. W/B says how soon a window visits a row again: after momentum has run out with "
        f"the paper's {papers['window_of_batch']:.0f} steps, mostly before that with our "
        f"{others[0]['window_of_batch']:.2g}, so that turns of visits add up. Visits in a window are not evenly apart; "
        "the first turn is that of epoch order."
    )
    config, _ = ours[0]
    factor = config.rows.row_learning_rate
    encoder = (
        "η and λ above are the rows'. On CIFAR-10 encoders have learning rates of their own, and are not matched: "
        f"PIC's, chosen on validation images, has λ·Ση = {others[0]['decay'] / factor:.2g} and η·N/B = "
        f"{others[0]['learning_per_pass'] / factor:.2g} where the paper's has {papers['decay']:.2g} and "
        f"{papers['learning_per_pass']:.0f}."
    )
    return _DERIVATION.format(numbers="\n".join(lines) + "\n", encoder=_wrapped(encoder), momentum=_wrapped(momentum))


def _beside(ours: float, papers: float) -> str:
    """A number and, unless it is about the paper's, by what factor it is away from it."""
    if alike(ours, papers):
        return f"{ours:.3g}"
    factor = f"× {ours / papers:.2g}" if ours > papers else f"÷ {papers / ours:.2g}"
    return f"{ours:.3g} ({factor})"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def _of_appendix(tables: Sequence[Table], runs: Runs) -> Iterator[str]:
    """How many effects show on Fashion-MNIST, and which."""
    found = [
        (table, text, effect)
        for table in tables
        if table.name in _APPENDIX
        for text, effect in zip(_texts(table), effects(table, runs), strict=True)
        if effect is not None
    ]
    if not found:
        return
    shown: dict[str, list[str]] = {}
    for table, text, effect in found:
        if effect.gains:
            shown.setdefault(table.title, []).append(text)
    number, opposite = sum(map(len, shown.values())), sum(each.shows and each.mean < 0 for *_, each in found)
    counted = (
        "The tables on grey images of 28 pixels, of which all but the last were run before the plan, are further from "
        f"the paper's proportions. They have [a page of their own]({APPENDIX}). Their p-values are too small, as seeds "
        f"were added where an effect was unclear and λ was chosen by the test images. Of {len(found)} effects "
        f"{len(found) - number - opposite} do not show, and {opposite} are reversed. {number} show:"
    )
    lines = "".join(f"- {title}: {'; '.join(texts)}\n" for title, texts in shown.items())
    yield f"\n## Appendix: Fashion-MNIST\n\n{_wrapped(counted)}\n\n{lines}"


def _section(table: Table, runs: Runs) -> str:
    lines = [f"## {_titled(table)}", ""]
    if table.text:
        lines += [_wrapped(table.text), ""]
    lines += [*_rows(table, runs), ""]
    judged = effects(table, runs)
    for text, claim, effect in zip(_texts(table), table.claims, judged, strict=True):
        if effect is not None:
            lines.append(f"- {_capitalised(text)}: {_said(table, runs, claim, effect)}")
    waiting = dict.fromkeys(claim.text for claim, effect in zip(table.claims, judged, strict=True) if effect is None)
    if waiting:
        lines.append(f"- Not judged before all seeds have run: {'; '.join(waiting)}")
    lines += [""] * bool(table.claims)
    if not _has_runs(table, runs):
        lines += ["None of them has run yet.", ""]
    elif table.name not in _APPENDIX:
        lines += [f"![{table.title}]({PICTURES}/{table.name}.svg)", ""]
    return "\n" + "\n".join(lines[:-1]) + "\n"


def _texts(table: Table) -> list[str]:
    """Texts of the table's claims; those of one text are told apart by their measures."""
    often = Counter(claim.text for claim in table.claims)
    return [
        f"{claim.text}, {table.measures[claim.measure]}" if often[claim.text] > 1 else claim.text
        for claim in table.claims
    ]


def _gains_on_both(runs: Runs) -> Iterator[str]:
    """Which ideas beyond the paper raise accuracy on both data sets, once all have been judged."""
    judged = [(table, effects(table, runs)) for table in (BEYOND, BEYOND_ON_FASHION_MNIST)]
    if any(effect is None for _, found in judged for effect in found):
        return
    gains = [
        {
            (claim.text, table.measures[claim.measure])
            for claim, effect in zip(table.claims, found, strict=True)
            if effect and effect.gains
        }
        for table, found in judged
    ]
    both = ", ".join(sorted({text.partition(":")[0] for text, _ in set.intersection(*gains)})) or "none"
    said = (
        f"Gains that show on [Fashion-MNIST]({APPENDIX}#beyond-the-paper) as well: {both}. What shows on both becomes "
    )
    yield f"\n{_wrapped(said + 'a default.')}\n"


def _capitalised(text: str) -> str:
    """A sentence's beginning; symbols such as τ stay as they are."""
    return text[0].upper() + text[1:] if text[0].isascii() else text


def _rows(table: Table, runs: Runs) -> Iterator[str]:
    """One line for each cell, one column for each measure and for the paper's."""
    papers = [measure for measure in table.measures if any(measure in numbers for numbers in table.paper.values())]
    of_papers = ["paper" if len(papers) == 1 else f"paper, {table.measures[measure]}" for measure in papers]
    yield f"| | {' | '.join([*table.measures.values(), 'seeds', *of_papers])} |"
    yield "|---|" + "---|" * (len(table.measures) + 1 + len(papers))
    for cell in table.cells:
        shown = [_shown(list(values(runs, cell, measure).values()), _digits(measure)) for measure in table.measures]
        numbers = [table.paper.get(cell.name, {}).get(measure) for measure in papers]
        quoted = ["" if n is None else f"{n:.1f}" if n == round(n, 1) else f"{n:g}" for n in numbers]
        yield f"| {' | '.join([cell.name, *shown, str(len(seeds_of(runs, cell))), *quoted])} |"


def _shown(measured: list[float], digits: int) -> str:
    """Mean ± standard deviation; a dash without runs."""
    if not measured:
        return "–"
    mean = f"{statistics.mean(measured):.{digits}f}"
    return f"{mean} ± {statistics.stdev(measured):.{digits}f}" if len(measured) > 1 else mean


def _said(table: Table, runs: Runs, claim: Claim, effect: Effect) -> str:
    digits = _digits(claim.measure)
    said = outcome(table, runs, claim, effect, digits)
    better, worse = (table.paper.get(name, {}).get(claim.measure) for name in (claim.better, claim.worse))
    paper = "" if better is None or worse is None else f" (the paper {better - worse:+.{digits}f})".replace("-", "−")
    return f"{said}{paper}, p = {effect.p:.2g}, corrected {effect.corrected:.2g}"


def _digits(measure: str) -> int:
    """Digits after the point."""
    return 2 if measure == LOSS else 1


def _hours(tables: Sequence[Table], runs: Runs) -> str:
    """The time that all runs took."""
    cells = [cell for table in tables for cell in table.cells]
    known = {cell.identity(seed) for cell in cells for seed in seeds_of(runs, cell)}
    hours = sum(runs[identity]["core_seconds"] for identity in known) / 3600
    processors = sorted({runs[identity].get("processor", "") for identity in known} - {""})
    on = f" ({', '.join(processors)})" if processors else ""
    return f"\n{len(known)} runs took at least {hours:.1f} hours of one core{on}, evaluations included.\n"
