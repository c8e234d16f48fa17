"""What the paper says, what is seen here, and in which proportions the runs differ from the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from experiments.cells import PIC, Cell, Claim, Table
from experiments.paired import Effect, effects
from experiments.results import Runs, seeds_of
from trainer.config import TrainConfig
from trainer.presets import PRESETS
from trainer.proportions import proportions

ALIKE = 0.05
"""Numbers of two runs that differ by at most this share count as equal."""
IMAGENET_1K, IMAGENET_11K = 1_281_167, 7_470_000
_SAME_AS_IMAGENET_1K = 1_000
"""Images of the cells that stand for it; those with more stand for ImageNet-11K."""
_MOST_CLASSES = 18
"""The paper's tables have sizes that are powers of two, of at most this exponent, or all images."""
_SYMBOLS = {
    "first_turn": "first turn",
    "total_turn": "total turn",
    "learning_per_pass": "η·N/B",
    "decay": "λ·Ση",
    "visits_per_row": "visits",
    "negatives_of_rows": "K/N",
    "negatives_of_batch": "K/B",
    "window_of_images": "W/N",
    "window_of_batch": "W/B",
    "stride_of_window": "S/W",
    "warmup_of_steps": "warm-up",
}
_HEADINGS = ("linear", "kNN")


def claim_table(tables: Sequence[Table], runs: Runs) -> Iterator[str]:
    """The lines of a Markdown table of all claims that the paper makes, or none if it makes none of them."""
    ordered = sorted(tables, key=lambda table: (not table.source.startswith("Table"), table.source))
    found = [line for table in ordered for line in _lines(table, runs)]
    if found:
        yield "| in the paper | compared | its numbers | linear, here | kNN, here | not within 5 % of the paper's |"
        yield "|---|---|---|---|---|---|"
        yield from found


def _lines(table: Table, runs: Runs) -> Iterator[str]:
    """One for each text of the table's claims that the paper has a word about."""
    cells = {cell.name: cell for cell in table.cells}
    seen: dict[str, dict[str, str]] = {}
    for claim, effect in zip(table.claims, effects(table, runs), strict=True):
        seen.setdefault(claim.text, {})[table.measures[claim.measure]] = outcome(table, runs, claim, effect)
    for claim in table.claims:
        if claim.paper:
            here = [seen[claim.text].get(heading, "–") for heading in _HEADINGS]
            both = dict.fromkeys(unlike(cells[name]) for name in claim.names if cells[name].method == PIC)
            columns = [table.source, claim.text, claim.paper, *here, "; ".join(both)]
            yield f"| {' | '.join(columns)} |"


def outcome(table: Table, runs: Runs, claim: Claim, effect: Effect | None, digits: int = 1) -> str:
    """Whether an effect shows and how large it is, or how much of it has run."""
    if effect is not None:
        word = "does not show" if not effect.shows else "shows" if effect.mean > 0 else "is reversed"
        return f"**{word}**, {effect.mean:+.{digits}f} ± {effect.half_width:.{digits}f}".replace("-", "−")
    seeds = [set(seeds_of(runs, cell)) for cell in table.cells if cell.name in claim.names]
    if not any(seeds):
        return "not run yet"
    return f"not judged yet: {len(set.intersection(*seeds))} of {max(2, table.seeds)} seeds"


def unlike(cell: Cell) -> str:
    """The dimensionless numbers of a cell that are not within 5 % of the paper's run that it stands for, with both."""
    config, number = cell.config(0), cell.num_images
    ours, papers = asdict(proportions(config, number)), asdict(proportions(*papers_run(config, number)))
    has_window = config.sampling.window_size < number
    return ", ".join(
        f"{symbol} {_short(ours[name])} for {_short(papers[name])}"
        for name, symbol in _SYMBOLS.items()
        if ours[name] is not None and not alike(ours[name], papers[name]) and (has_window or name != "window_of_batch")
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def alike(ours: float, papers: float) -> bool:
    return abs(ours / papers - 1) <= ALIKE


def papers_run(config: TrainConfig, num_images: int) -> tuple[TrainConfig, int]:
    """The paper's run for a cell: settings and number of images. It has as many visits, and of K, W and S, which are
    powers of two there, those that are nearest to the same share of the images."""
    number = IMAGENET_1K if num_images <= _SAME_AS_IMAGENET_1K else IMAGENET_11K
    _, paper = PRESETS["imagenet-1k"]

    def size(ours: int) -> int:
        return number if ours == num_images else 1 << min(_MOST_CLASSES, round(math.log2(ours / num_images * number)))

    settings = paper.with_settings(
        epochs=config.optimization.epochs,
        num_negatives=size(config.rows.num_negatives),
        window_size=size(config.sampling.window_size),
        window_stride=size(config.sampling.window_stride),
    )
    return settings, number
