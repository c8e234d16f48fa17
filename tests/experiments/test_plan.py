"""The plan for CIFAR-10: its cells have the paper's proportions, and its statistics are the textbook's."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from scipy import stats

from experiments.__main__ import RESULTS
from experiments.cells import Cell, Claim, Table
from experiments.page import text_of
from experiments.paired import effects, holm, paired_effect
from experiments.results import Run, load, values
from experiments.run_cell import _validated
from experiments.tables.cifar import CIFAR_10, LEARNING_RATES, METHODS, SEEDS, TRIALS
from experiments.tables.gpu import GPU
from trainer.data import Dataset
from trainer.presets import PRESETS
from trainer.proportions import proportions

UNMATCHED = {"negatives_of_batch", "window_of_batch", "learning_per_pass"}
"""What PLAN.md says cannot be matched."""


@pytest.mark.parametrize("cell", [METHODS.cells[0], GPU.cells[0]], ids=["CPU", "GPU"])
def test_the_cells_have_the_papers_proportions(cell: Cell) -> None:
    paper = asdict(proportions(PRESETS["imagenet-1k"][1], 1_281_167))
    ours = asdict(proportions(cell.config(0), cell.num_images))
    matched = paper.keys() - UNMATCHED
    assert {name: ours[name] for name in matched} == pytest.approx({name: paper[name] for name in matched}, rel=0.05)


def test_every_cell_has_five_seeds() -> None:
    for table in CIFAR_10:
        assert table.seeds == (1 if table is TRIALS else SEEDS)
        assert all(each.validation == (table is TRIALS) for cell in table.cells for each in cell.evaluations)
    identities = {cell.identity(0) for table in CIFAR_10[1:] for cell in table.cells}
    assert len(TRIALS.cells) + SEEDS * len(identities) == 235, "PLAN.md counts them"


def test_learning_rates_are_the_best_of_the_trials() -> None:
    """Of methods whose trials have all run."""
    measured = load(RESULTS)
    for method, chosen in LEARNING_RATES.items():
        cells = [cell for cell in TRIALS.cells if cell.name.startswith(f"{method}, η")]
        assert len(cells) == 5
        found = {cell.name: values(measured, cell, "linear-validated.top1") for cell in cells}
        if all(found.values()):
            assert max(found, key=lambda name: found[name][0]) == f"{method}, η = {chosen:g}"


def test_settings_are_chosen_on_images_that_no_run_is_trained_on() -> None:
    images, labels = torch.arange(6_000)[:, None], torch.arange(6_000)
    found = _validated(
        Dataset(train_images=images, train_labels=labels, test_images=images[:1], test_labels=labels[:1])
    )
    assert isinstance(found.test_images, torch.Tensor)
    assert found.train_labels.tolist() == list(range(1_000))
    assert found.test_labels.tolist() == found.test_images[:, 0].tolist() == list(range(1_000, 6_000))


def test_paired_effects_are_those_of_the_t_test() -> None:
    better, worse = [51.0, 52.5, 50.1, 53.2, 51.9], [50.2, 51.0, 50.3, 52.1, 50.8]
    found, expected = paired_effect(better, worse), stats.ttest_rel(better, worse)
    interval = expected.confidence_interval()
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(tuple(interval))
    assert found.p == pytest.approx(expected.pvalue)
    assert paired_effect([50.0, 51.0], [50.0, 51.0]).p == 1.0
    with pytest.raises(ValueError, match="1 pairs of runs tell no spread: give at least 2"):
        paired_effect([1.0], [2.0])


def test_a_difference_of_differences_is_paired_by_seed() -> None:
    """The first pair differs by 1, 2 and 3, the second by 1, 1 and 1."""
    claim = Claim(text="", better="ours", worse="worse", measure="top1", beyond=("alike", "late"))
    table = replace(PAIRED, claims=(claim,))
    measured = runs("ours", 11, 22, 33) | runs("worse", 10, 20, 30) | runs("alike", 5, 6, 7)
    assert effects(table, measured | runs("late", 4, 5)) == [None]
    (found,) = effects(table, measured | runs("late", 4, 5, 6))
    assert found is not None
    assert (found.mean, found.p) == pytest.approx((1.0, stats.ttest_1samp([0, 1, 2], 0).pvalue))


def test_holms_correction() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


CELLS = {
    name: Cell(name=name, settings={"epochs": float(n)}) for n, name in enumerate(("ours", "worse", "alike", "late"))
}
PAIRED = Table(
    name="paired",
    title="Paired",
    cells=tuple(CELLS.values()),
    measures={"top1": "top-1"},
    claims=tuple(
        Claim(text=f"ours is better than {name}", better="ours", worse=name, measure="top1")
        for name in ("worse", "alike", "late")
    ),
    seeds=3,
)


def runs(name: str, *accuracies: float) -> dict[str, Run]:
    """A run of each seed."""
    return {
        CELLS[name].identity(seed): {"measures": {"top1": value}, "core_seconds": 60.0}
        for seed, value in enumerate(accuracies)
    }


def test_claims_are_judged_once_all_seeds_have_run_and_corrected_together() -> None:
    """Accuracies differ more between seeds than by the effect, which pairs show all the same."""
    measured = (
        runs("ours", 50.0, 60.0, 70.0)
        | runs("worse", 48.9, 59.1, 69.0)
        | runs("alike", 51.0, 58.0, 71.0)
        | runs("late", 10.0, 20.0)
    )
    worse, alike, late = effects(PAIRED, measured)
    by_itself = stats.ttest_rel([50.0, 60.0, 70.0], [48.9, 59.1, 69.0]).pvalue
    assert worse is not None
    assert (worse.p, worse.corrected) == pytest.approx((by_itself, 3 * by_itself))
    assert worse.shows
    assert alike is not None
    assert not alike.shows
    assert late is None
    further = {
        CELLS[name].identity(3): {"measures": {"top1": value}} for name, value in (("ours", 90.0), ("worse", 0.0))
    }
    assert effects(PAIRED, measured | further) == [worse, alike, late], "seeds that the plan does not have"
    text = text_of([PAIRED], measured)
    assert f"**shows**, +1.0 ± 0.2, p = {by_itself:.2g}, corrected {3 * by_itself:.2g}" in text
    assert "- Not judged before all seeds have run: ours is better than late\n" in text
